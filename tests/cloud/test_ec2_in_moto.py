"""What an EC2 pod is declared with, played into moto's EC2 and IAM: a wrong name or an impossible rule is refused.

pulumi-aws's plugin makes these calls elsewhere. Every argument has to be played: one that is not known here fails.
"""

from __future__ import annotations

import base64
import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from botocore.model import ListShape, Shape, StringShape, StructureShape
from moto import mock_aws
from moto.ec2.models.amis import AMIS

from tests.components.test_graph import project
from tests.support.ec2 import HOST_KEY, Cloud, Declared, opened, plan
from tests.support.pulumi_aws import need_pulumi_aws

need_pulumi_aws()

from tests.components.test_ec2 import BASE, NAME, TAGS, pod, stack_file  # noqa: E402

__all__ = ["project"]

pytestmark = [
    pytest.mark.usefixtures("project"),
    pytest.mark.filterwarnings("ignore:aws.ec2/:DeprecationWarning"),
]

REGION = "eu-central-1"
ROLE = f"{NAME}-{REGION}"
AWS_TAGS = [{"Key": key, "Value": value} for key, value in TAGS.items()]
# In the order of their dependencies.
KINDS = (
    *("KeyPair", "SecurityGroup", "Role", "RolePolicy", "InstanceProfile", "Instance"),
    *("Eip", "EipAssociation", "InstanceState"),
)


class Account:
    """An AWS account of moto's. `play` makes one resource of it, `ids` are those of the recorder and AWS's own."""

    def __init__(self) -> None:
        self.ec2 = boto3.client("ec2", region_name=REGION)
        self.iam = boto3.client("iam", region_name=REGION)
        self.ids: dict[str, str] = {}

    def play(self, item: Declared) -> None:
        kind = item.type.split(":")[-1]
        left = {key: self._own(value) for key, value in item.inputs.items()}
        getattr(self, f"_{kind}")(item.name, left)
        assert left == {}, f"{kind} has arguments that nobody played"

    def _own(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._own(one) for one in value]
        return self.ids.get(value, value) if isinstance(value, str) else value

    def _call(self, client: Any, operation: str, **arguments: Any) -> Any:
        given = {name: value for name, value in arguments.items() if value is not None}
        method = "".join(word.title() for word in operation.split("_"))
        _fits(client.meta.service_model.operation_model(method).input_shape, given)
        return getattr(client, operation)(**given)

    def _KeyPair(self, name: str, left: dict[str, Any]) -> None:
        key = left.pop("publicKey").encode()
        tagged = _tagged("key-pair", left.pop("tags"))
        self._call(
            self.ec2, "import_key_pair", KeyName=left.pop("keyName"), PublicKeyMaterial=key, TagSpecifications=tagged
        )

    def _SecurityGroup(self, name: str, left: dict[str, Any]) -> None:
        # The provider adds 26 characters of its own, so that no name is there already.
        group_name, vpc = left.pop("namePrefix") + "0" * 26, left.pop("vpcId", None)
        assert not group_name.startswith("sg-"), "AWS takes no name like an id"
        # moto takes any id.
        self.ec2.describe_vpcs(VpcIds=[vpc] if vpc else [])
        group = self._call(
            self.ec2,
            "create_security_group",
            GroupName=group_name,
            Description=left.pop("description"),
            VpcId=vpc,
            TagSpecifications=_tagged("security-group", left.pop("tags")),
        )["GroupId"]
        self.ids[f"{name}-id"] = group
        (made,) = self.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"]
        # As the provider does with the rule that AWS gives every group.
        self.ec2.revoke_security_group_egress(GroupId=group, IpPermissions=made["IpPermissionsEgress"])
        for way in ("ingress", "egress"):
            rules = [_permission(rule) for rule in left.pop(way)]
            self._call(self.ec2, f"authorize_security_group_{way}", GroupId=group, IpPermissions=rules)

    def _Role(self, name: str, left: dict[str, Any]) -> None:
        role, trust = left.pop("name"), left.pop("assumeRolePolicy")
        tags = _pairs(left.pop("tags"))
        self._call(self.iam, "create_role", RoleName=role, AssumeRolePolicyDocument=trust, Tags=tags)
        # moto reads a trust policy here alone.
        self._call(self.iam, "update_assume_role_policy", RoleName=role, PolicyDocument=trust)

    def _RolePolicy(self, name: str, left: dict[str, Any]) -> None:
        self._call(
            self.iam,
            "put_role_policy",
            RoleName=left.pop("role"),
            PolicyName=left.pop("name"),
            PolicyDocument=left.pop("policy"),
        )

    def _InstanceProfile(self, name: str, left: dict[str, Any]) -> None:
        profile = left.pop("name")
        self._call(self.iam, "create_instance_profile", InstanceProfileName=profile, Tags=_pairs(left.pop("tags")))
        self._call(self.iam, "add_role_to_instance_profile", InstanceProfileName=profile, RoleName=left.pop("role"))

    def _Instance(self, name: str, left: dict[str, Any]) -> None:
        image, key, profile = left.pop("ami"), left.pop("keyName"), left.pop("iamInstanceProfile", None)
        # moto takes any name for these.
        self.ec2.describe_images(ImageIds=[image])
        self.ec2.describe_key_pairs(KeyNames=[key])
        if profile:
            self.iam.get_instance_profile(InstanceProfileName=profile)
        disk = left.pop("rootBlockDevice")
        market = left.pop("instanceMarketOptions", None)
        volume_tags = _tagged("volume", disk.pop("tags"))
        self.ids[f"{name}-id"] = self._call(
            self.ec2,
            "run_instances",
            MinCount=1,
            MaxCount=1,
            ImageId=image,
            InstanceType=left.pop("instanceType"),
            KeyName=key,
            SecurityGroupIds=left.pop("vpcSecurityGroupIds"),
            IamInstanceProfile={"Name": profile} if profile else None,
            MetadataOptions=_capital(left.pop("metadataOptions")),
            BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": _capital(disk)}],
            InstanceMarketOptions=_capital(market) if market else None,
            UserData=opened(left.pop("userData")),
            TagSpecifications=_tagged("instance", left.pop("tags")) + volume_tags,
        )["Instances"][0]["InstanceId"]

    def _Eip(self, name: str, left: dict[str, Any]) -> None:
        tagged = _tagged("elastic-ip", left.pop("tags"))
        made = self._call(self.ec2, "allocate_address", Domain=left.pop("domain"), TagSpecifications=tagged)
        self.ids["eipalloc-1"] = made["AllocationId"]

    def _EipAssociation(self, name: str, left: dict[str, Any]) -> None:
        allocation, instance = left.pop("allocationId"), left.pop("instanceId")
        self._call(self.ec2, "associate_address", AllocationId=allocation, InstanceId=instance)

    def _InstanceState(self, name: str, left: dict[str, Any]) -> None:
        operation = {"running": "start_instances", "stopped": "stop_instances"}[left.pop("state")]
        self._call(self.ec2, operation, InstanceIds=[left.pop("instanceId")])

    def instance(self) -> dict[str, Any]:
        ((instance,),) = [one["Instances"] for one in self.ec2.describe_instances()["Reservations"]]
        found: dict[str, Any] = instance
        return found

    def security_group(self) -> dict[str, Any]:
        (group,) = self.ec2.describe_security_groups(GroupNames=[f"{NAME}-{'0' * 26}"])["SecurityGroups"]
        found: dict[str, Any] = group
        return found


def _fits(shape: Shape, given: Any) -> None:
    """Words, patterns and lengths are as botocore's model of the API has them; moto takes others."""
    if isinstance(shape, StructureShape):
        for name, value in given.items():
            _fits(shape.members[name], value)
    elif isinstance(shape, ListShape):
        for value in given:
            _fits(shape.member, value)
    elif isinstance(shape, StringShape):
        assert not shape.enum or given in shape.enum, f"{given!r} is no {shape.name}: {shape.enum}"
        pattern, longest = shape.metadata.get("pattern", ".*"), shape.metadata.get("max", len(given))
        # Java's classes of characters, which stand for any text in the patterns of policies and tags.
        if "\\p{" not in pattern and "\\u" not in pattern:
            assert re.fullmatch(pattern, given, re.DOTALL), f"{given!r} is no {shape.name}: {pattern}"
        assert len(given) <= longest, f"{given!r} is longer than a {shape.name}: {longest}"


def _pairs(tags: Mapping[str, str]) -> list[dict[str, str]]:
    for text in (*tags, *tags.values()):
        assert re.fullmatch(r"(?!aws:)[\w .:/=+@-]{1,256}", text), f"{text!r} cannot be in a tag"
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def _tagged(kind: str, tags: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"ResourceType": kind, "Tags": _pairs(tags)}]


def _capital(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`httpTokens` as AWS's API has it, `HttpTokens`; numbers come from Pulumi's protocol as floats."""
    found: dict[str, Any] = {}
    for key, value in arguments.items():
        if isinstance(value, Mapping):
            value = _capital(value)
        elif isinstance(value, float):
            value = int(value)
        found[key[0].upper() + key[1:]] = value
    return found


def _permission(rule: Mapping[str, Any]) -> dict[str, Any]:
    left = dict(rule)
    description = left.pop("description")
    assert re.fullmatch(r"[a-zA-Z0-9. _:/()#,@\[\]+=&;{}!$*-]{1,255}", description), "AWS takes no other characters"
    protocol = left.pop("protocol")
    assert protocol in ("tcp", "udp", "icmp", "icmpv6", "-1"), f"{protocol!r} is no protocol"
    permission = {
        "IpProtocol": protocol,
        "FromPort": int(left.pop("fromPort")),
        "ToPort": int(left.pop("toPort")),
        "IpRanges": [{"CidrIp": cidr, "Description": description} for cidr in left.pop("cidrBlocks", [])],
        "Ipv6Ranges": [{"CidrIpv6": cidr, "Description": description} for cidr in left.pop("ipv6CidrBlocks", [])],
    }
    assert left == {}
    return permission


@pytest.fixture
def account() -> Iterator[Account]:
    with mock_aws():
        yield Account()


@pytest.fixture
def cloud() -> Cloud:
    """Whose AMI of the day is one that moto has."""
    return Cloud({"x86_64": AMIS[0]["ami_id"]})


def declared(cloud: Cloud, *pods: dict[str, Any], **more: Any) -> list[Declared]:
    planned = plan(stack_file(*pods, **{"store": "s3://acme/bundles", **more}), cloud=cloud)
    return sorted(planned.of_aws(), key=lambda item: KINDS.index(item.type.split(":")[-1]))


def permissions(found: list[dict[str, Any]]) -> list[tuple[str, int, int, list[str], list[str]]]:
    return sorted(
        (
            rule["IpProtocol"],
            rule["FromPort"],
            rule["ToPort"],
            [one["CidrIp"] for one in rule["IpRanges"]],
            [one["CidrIpv6"] for one in rule["Ipv6Ranges"]],
        )
        for rule in found
    )


def test_aws_makes_what_is_declared(account: Account, cloud: Cloud) -> None:
    engine = {"listen": "0.0.0.0", "port": 8001}
    for item in declared(cloud, pod(engine=engine, engineCidr="10.0.0.0/8"), apiKey="k" * 20):
        account.play(item)

    group = account.security_group()
    assert permissions(group["IpPermissions"]) == [
        ("tcp", 22, 22, ["203.0.113.7/32"], []),
        ("tcp", 8001, 8001, ["10.0.0.0/8"], []),
    ]
    assert permissions(group["IpPermissionsEgress"]) == [
        ("tcp", 80, 80, ["0.0.0.0/0"], ["::/0"]),
        ("tcp", 443, 443, ["0.0.0.0/0"], ["::/0"]),
    ]

    instance = account.instance()
    assert instance["State"]["Name"] == "running"
    assert instance["InstanceType"] == "g6e.xlarge"
    assert instance["KeyName"] == NAME
    assert [one["GroupId"] for one in instance["SecurityGroups"]] == [group["GroupId"]]
    assert instance["IamInstanceProfile"]["Arn"].endswith(f":instance-profile/{ROLE}")
    assert sorted(instance["Tags"], key=str) == sorted(AWS_TAGS, key=str)
    asked = account.ec2.describe_instance_attribute(InstanceId=instance["InstanceId"], Attribute="userData")
    assert HOST_KEY.splitlines()[1].encode() in base64.b64decode(asked["UserData"]["Value"])

    (volume,) = account.ec2.describe_volumes()["Volumes"]
    assert (volume["Size"], volume["VolumeType"], volume["Encrypted"]) == (200, "gp3", True)
    assert sorted(volume["Tags"], key=str) == sorted(AWS_TAGS, key=str)

    (address,) = account.ec2.describe_addresses()["Addresses"]
    assert (address["Domain"], address["InstanceId"]) == ("vpc", instance["InstanceId"])

    profile = account.iam.get_instance_profile(InstanceProfileName=ROLE)["InstanceProfile"]
    assert [role["RoleName"] for role in profile["Roles"]] == [ROLE]
    policy = account.iam.get_role_policy(RoleName=ROLE, PolicyName="store")["PolicyDocument"]
    assert policy["Statement"] == [
        {"Effect": "Allow", "Action": "s3:GetObject", "Resource": "arn:aws:s3:::acme/bundles/sha256/*"}
    ]
    assert account.iam.list_attached_role_policies(RoleName=ROLE)["AttachedPolicies"] == []


def test_switched_off_it_is_stopped_and_keeps_disk_and_address(account: Account, cloud: Cloud) -> None:
    for item in declared(cloud):
        account.play(item)
    before = account.instance(), account.ec2.describe_addresses()["Addresses"]
    (off,) = [item for item in declared(cloud, running=False) if item.name == f"{BASE}-state"]
    account.play(off)
    assert account.instance()["State"]["Name"] == "stopped"
    (on,) = [item for item in declared(cloud) if item.name == f"{BASE}-state"]
    account.play(on)
    after = account.instance(), account.ec2.describe_addresses()["Addresses"]
    assert after[0]["BlockDeviceMappings"] == before[0]["BlockDeviceMappings"]
    assert (after[0]["InstanceId"], after[1]) == (before[0]["InstanceId"], before[1])


def test_a_spot_instance_in_a_subnet(account: Account, cloud: Cloud) -> None:
    for item in declared(cloud, pod(spot=True)):
        account.play(item)
    assert account.instance()["InstanceLifecycle"] == "spot"


def test_a_stack_of_long_names(account: Account, cloud: Cloud) -> None:
    for item in declared(cloud, pod("meta-llama/" + "long-" * 60)):
        account.play(item)
    assert len(account.instance()["KeyName"]) == 64


def test_a_rotated_key_takes_the_name_of_the_old_one(account: Account, cloud: Cloud) -> None:
    (pair,) = [item for item in declared(cloud) if item.type.endswith(":KeyPair")]
    account.play(pair)
    with pytest.raises(ClientError, match=r"InvalidKeyPair\.Duplicate"):
        account.play(pair)
    assert pair.delete_before_replace
    account.ec2.delete_key_pair(KeyName=NAME)
    account.play(pair)


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("kind", "change", "refusal"),
    [
        ("KeyPair", lambda inputs: inputs.update(publicKey="ssh-ed25519 AAAA"), r"InvalidKeyPair\.Format"),
        ("SecurityGroup", lambda inputs: inputs["ingress"][0].update(cidrBlocks=["1.2.3.4/33"]), "InvalidParameter"),
        ("SecurityGroup", lambda inputs: inputs["ingress"][0].update(protocol="tpc"), "is no protocol"),
        ("SecurityGroup", lambda inputs: inputs["egress"].append(inputs["egress"][0]), r"InvalidPermission\.Duplicate"),
        ("SecurityGroup", lambda inputs: inputs.update(vpcId="vpc-0123456789abcdef0"), r"InvalidVpcID\.NotFound"),
        ("SecurityGroup", lambda inputs: inputs.update(namePrefix="sg-pod"), "no name like an id"),
        ("Role", lambda inputs: inputs.update(name="lora-pods/x"), "is no roleNameType"),
        ("Role", lambda inputs: inputs.update(name="x" * 65), "is longer than a roleNameType"),
        (
            "Role",
            lambda inputs: inputs.update(assumeRolePolicy=inputs["assumeRolePolicy"].replace("sts:", "s3:")),
            "MalformedPolicyDocument",
        ),
        ("RolePolicy", lambda inputs: inputs.update(role="nobody"), "NoSuchEntity"),
        (
            "RolePolicy",
            lambda inputs: inputs.update(policy=inputs["policy"].replace("arn:aws:s3:::", "arn:aws:s3:")),
            "MalformedPolicyDocument",
        ),
        (
            "RolePolicy",
            lambda inputs: inputs.update(policy=inputs["policy"].replace("s3:GetObject", "GetObject")),
            "MalformedPolicyDocument",
        ),
        ("InstanceProfile", lambda inputs: inputs.update(role="nobody"), "NoSuchEntity"),
        ("InstanceProfile", lambda inputs: inputs.update(tags={"aws:stack": "acme"}), "cannot be in a tag"),
        ("Instance", lambda inputs: inputs.update(ami="ami-0123456789abcdef0"), r"InvalidAMIID\.NotFound"),
        ("Instance", lambda inputs: inputs.update(instanceType="g6e.tiny"), "is no InstanceType"),
        ("Instance", lambda inputs: inputs.update(keyName="nobody"), r"InvalidKeyPair\.NotFound"),
        ("Instance", lambda inputs: inputs.update(iamInstanceProfile="nobody"), "NoSuchEntity"),
        ("Instance", lambda inputs: inputs.update(vpcSecurityGroupIds=["sg-0123456789"]), r"InvalidGroup\.NotFound"),
        ("Instance", lambda inputs: inputs["metadataOptions"].update(httpTokens="always"), "is no "),
        ("Instance", lambda inputs: inputs["metadataOptions"].update(httpToken="required"), "httpToken|HttpToken"),
        ("Instance", lambda inputs: inputs["rootBlockDevice"].update(volumeType="gp4"), "is no "),
        ("Instance", lambda inputs: inputs.update(monitoring=True), "nobody played"),
        ("Eip", lambda inputs: inputs.update(domain="vcp"), "is no "),
        ("EipAssociation", lambda inputs: inputs.update(allocationId="eipalloc-2"), r"InvalidAllocationID\.NotFound"),
        ("InstanceState", lambda inputs: inputs.update(instanceId="i-0123456789abcdef0"), r"InvalidInstanceID"),
        ("InstanceState", lambda inputs: inputs.update(state="off"), "off"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(account: Account, cloud: Cloud, kind: str, change: Change, refusal: str) -> None:
    """Each fault alone, in what is otherwise as declared: the playing above would notice it."""
    for item in declared(cloud):
        if item.type.endswith(f":{kind}"):
            wrong = copy.deepcopy(item.inputs)
            change(wrong)
            with pytest.raises((ClientError, AssertionError, KeyError), match=refusal):
                account.play(replace(item, inputs=wrong))
            return
        account.play(item)
    raise AssertionError(f"there is no {kind}")


def test_the_policies_that_the_documents_show_are_policies(account: Account) -> None:
    root = Path(__file__).resolve().parents[2]
    (shown,) = re.findall(r"```json\n(.*?)```", (root / "docs" / "store.md").read_text(encoding="utf-8"), re.DOTALL)
    for name, text in (("store", shown), ("ec2", (root / "docs" / "ec2-policy.json").read_text(encoding="utf-8"))):
        account.iam.create_policy(PolicyName=name, PolicyDocument=text)
    with pytest.raises(ClientError, match="MalformedPolicyDocument"):
        account.iam.create_policy(PolicyName="wrong", PolicyDocument=shown.replace("s3:GetObject", "GetObject"))
