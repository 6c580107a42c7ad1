"""`ec2`: an instance of AWS that is made for its base and ends with it. The only owner of pulumi-aws.

What is not said here is AWS's own default. Names of AWS's things are fixed: two stacks of one name in one account and
region are told so by AWS, and nothing is replaced because a name was made up anew.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

import pulumi

from components.core.ec2_gpus import cpu_architecture
from components.core.errors import UserError, printable
from components.core.naming import engine_key
from components.core.ssh_key import fingerprint
from components.pods.contract import Machine
from components.pods.credentials import STACK_KEY, private_key_text
from components.pods.host_key import HostKey
from components.pods.keys import public_half
from components.remote import Connection
from components.settings import LOOPBACK, Ec2, Pod, Settings

try:
    import pulumi_aws as aws
except ModuleNotFoundError as missing:
    if missing.name != "pulumi_aws":
        raise
    raise UserError(
        "a pod is of the kind `ec2`, and pulumi-aws is not installed: run `./dev setup --with aws`"
    ) from None

# AWS starts an instance, runs cloud-init and then sshd; a large one takes minutes.
PATIENCE = 600
# https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_iam-quotas.html; all other names may be longer.
LONGEST_NAME = 64
# Ubuntu 24.04, since its own Python is one that vLLM runs on.
AMI_PARAMETER = "/aws/service/deeplearning/ami/{0}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
_ANYWHERE = ("0.0.0.0/0", "::/0")


def providers(settings: Settings, opts: pulumi.ResourceOptions) -> dict[str, pulumi.ProviderResource]:
    """By base, AWS as its pod uses it: one for all pods of a region and a profile.

    Raises UserError for a key that EC2 does not take, before anything is made.
    """
    public_half(private_key_text(STACK_KEY, settings))
    made: dict[tuple[str, str | None], pulumi.ProviderResource] = {}
    found = {}
    for pod in settings.pods:
        if pod.ec2:
            place = (pod.ec2.region, pod.ec2.profile)
            if place not in made:
                name = "-".join(filter(None, ("aws", pod.ec2.profile, pod.ec2.region)))
                made[place] = aws.Provider(name, region=pod.ec2.region, profile=pod.ec2.profile, opts=opts)
            found[pod.base] = made[place]
    return found


def machine(ec2: Ec2, pod: Pod, settings: Settings, stack: str, opts: pulumi.ResourceOptions) -> Machine:
    """`opts` name the parent, from which all of it has its provider (see `providers`)."""
    _warn_of_the_open(ec2, pod, opts)
    name, private_key = aws_name(stack, pod.base), private_key_text(STACK_KEY, settings)
    tags = {"Name": name, "lora-pods:stack": _tag(stack), "lora-pods:base": _tag(pod.base)}
    host_key = HostKey(f"{pod.base}-host-key", opts)
    key_pair = aws.ec2.KeyPair(
        f"{pod.base}-key-pair",
        key_name=name,
        public_key=public_half(private_key),
        tags=tags,
        # A rotated key's pair has the name of the old one.
        opts=_with(opts, delete_before_replace=True),
    )
    firewall = aws.ec2.SecurityGroup(
        f"{pod.base}-security-group",
        # One of another VPC is there before the old one goes, which the instance holds until then.
        name_prefix=f"{name}-",
        description="A pod of lora-pods",
        vpc_id=_vpc(ec2, opts),
        ingress=list(_ingress(ec2, pod)),
        egress=list(_egress(settings)),
        tags=tags,
        opts=opts,
    )
    instance = aws.ec2.Instance(
        f"{pod.base}-instance",
        ami=ec2.ami or _todays_ami(ec2, opts),
        instance_type=ec2.instance_type,
        instance_market_options=_spot() if ec2.spot else None,
        subnet_id=ec2.subnet_id,
        associate_public_ip_address=None if ec2.public_ip else False,
        vpc_security_group_ids=[firewall.id],
        # Its name and no output: an instance has the key of the day it was made, and another one does not replace it.
        key_name=name,
        iam_instance_profile=_store_reader(pod, ec2, settings, stack, tags, opts),
        metadata_options=aws.ec2.InstanceMetadataOptionsArgs(
            http_endpoint="enabled", http_tokens="required", http_put_response_hop_limit=1
        ),
        root_block_device=aws.ec2.InstanceRootBlockDeviceArgs(
            volume_type="gp3", volume_size=ec2.volume_gi_b, encrypted=True, delete_on_termination=True, tags=tags
        ),
        user_data=_user_data(host_key),
        tags=tags,
        opts=_with(
            opts,
            # The key pair is referred to by its name alone, and has to be there before.
            depends_on=[key_pair],
            ignore_changes=_ignored(ec2, settings),
            # A spot instance that is stopped cannot be given another type (EC2's user guide, spot interruptions).
            replace_on_changes=["instance_type"] if ec2.spot else None,
            # Two at a time would need twice the quota, and the first one's address goes before the second one serves.
            delete_before_replace=True,
            additional_secret_outputs=["user_data"],
        ),
    )
    ready = [
        aws.ec2transitgateway.InstanceState(
            f"{pod.base}-state",
            instance_id=instance.id,
            state="running" if settings.running else "stopped",
            opts=opts,
        )
    ]
    address = instance.private_ip
    if ec2.public_ip:
        elastic = aws.ec2.Eip(f"{pod.base}-address", domain="vpc", tags=tags, opts=opts)
        associated = aws.ec2.EipAssociation(
            f"{pod.base}-association", allocation_id=elastic.allocation_id, instance_id=instance.id, opts=opts
        )
        address, ready = elastic.public_ip, [*ready, associated]
    reached_at = "127.0.0.1" if pod.listen in LOOPBACK else address
    return Machine(
        connection=Connection(
            address=address,
            port=22,
            user=ec2.user,
            host_key=host_key.public_key,
            credential=STACK_KEY,
            private_key=pulumi.Output.secret(private_key),
        ),
        identity=pulumi.Output.format("{0} {1}", host_key.public_key.apply(fingerprint), instance.id),
        endpoint=pulumi.Output.format("{0}://{1}:{2}/v1", pod.scheme, reached_at, pod.engine.port),
        resource=instance,
        ready=tuple(ready),
        patience=PATIENCE,
        # Behind an Elastic IP, another instance or a restarted one is reached as the first was.
        incarnation=pulumi.Output.format("{0} {1}", instance.id, ec2.instance_type),
    )


def _ignored(ec2: Ec2, settings: Settings) -> list[str]:
    """What of an instance stays as it was made; all of it while it is off: a change would switch it on."""
    if not settings.running:
        return ["*"]
    # What a later release tells cloud-init, today's AMI, and what an Elastic IP is taken for, are for later instances.
    return ["user_data", "associate_public_ip_address", *([] if ec2.ami else ["ami"])]


def aws_name(stack: str, base: str, region: str | None = None) -> str:
    """What a pod's things are called at AWS; they live as long as the pod does (docs/naming.md).

    IAM knows no regions, so a name there has its pod's: in another one, the new role comes before the old one goes.
    """
    name = "-".join(filter(None, ("lora-pods", engine_key(stack, base), region)))
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _tag(text: str) -> str:
    """A text as a tag's value may be: https://docs.aws.amazon.com/tag-editor/latest/userguide/best-practices-and-strats.html"""
    return re.sub(r"[^\w .:/=+@-]", "_", text)[:256]


def _with(opts: pulumi.ResourceOptions, **more: object) -> pulumi.ResourceOptions:
    return pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(**more))  # type: ignore[arg-type]


def _vpc(ec2: Ec2, opts: pulumi.ResourceOptions) -> pulumi.Input[str] | None:
    """The subnet's VPC; None is the default one."""
    if ec2.subnet_id is None:
        return None
    subnet = aws.ec2.get_subnet_output(id=ec2.subnet_id, opts=pulumi.InvokeOutputOptions(parent=opts.parent))
    vpc: pulumi.Output[str] = subnet.vpc_id
    return vpc


def _todays_ami(ec2: Ec2, opts: pulumi.ResourceOptions) -> pulumi.Output[str]:
    parameter = aws.ssm.get_parameter_output(
        name=AMI_PARAMETER.format(cpu_architecture(ec2.instance_type)),
        opts=pulumi.InvokeOutputOptions(parent=opts.parent),
    )
    # A public parameter, whatever the provider makes of it.
    ami: pulumi.Output[str] = pulumi.Output.unsecret(parameter.value)
    return ami


def _ingress(ec2: Ec2, pod: Pod) -> Iterator[aws.ec2.SecurityGroupIngressArgs]:
    yield aws.ec2.SecurityGroupIngressArgs(description="SSH", **_ports(22), **_networks([ec2.ssh_cidr]))
    if ec2.engine_cidr:
        yield aws.ec2.SecurityGroupIngressArgs(
            description="The engine", **_ports(pod.engine.port), **_networks([ec2.engine_cidr])
        )


def _egress(settings: Settings) -> Iterator[aws.ec2.SecurityGroupEgressArgs]:
    """AWS's own DNS, time and metadata services need no rule."""
    yield aws.ec2.SecurityGroupEgressArgs(description="HTTPS", **_ports(443), **_networks(_ANYWHERE))
    yield aws.ec2.SecurityGroupEgressArgs(description="HTTP, for the system", **_ports(80), **_networks(_ANYWHERE))
    port = urlsplit(settings.store.endpoint or "").port if settings.store else None
    if port not in (None, 80, 443):
        yield aws.ec2.SecurityGroupEgressArgs(description="The store", **_ports(port), **_networks(_ANYWHERE))


def _ports(port: int) -> dict[str, str | int]:
    return {"protocol": "tcp", "from_port": port, "to_port": port}


def _networks(cidrs: Sequence[str]) -> dict[str, list[str]]:
    by_version = {
        version: [cidr for cidr in cidrs if ipaddress.ip_network(cidr).version == version] for version in (4, 6)
    }
    found = {"cidr_blocks": by_version[4], "ipv6_cidr_blocks": by_version[6]}
    return {key: networks for key, networks in found.items() if networks}


def _spot() -> aws.ec2.InstanceInstanceMarketOptionsArgs:
    """One that can be stopped, by us or by AWS, and started again; its request is cancelled with the instance."""
    options = aws.ec2.InstanceInstanceMarketOptionsSpotOptionsArgs(
        spot_instance_type="persistent", instance_interruption_behavior="stop"
    )
    return aws.ec2.InstanceInstanceMarketOptionsArgs(market_type="spot", spot_options=options)


def _store_reader(
    pod: Pod, ec2: Ec2, settings: Settings, stack: str, tags: Mapping[str, str], opts: pulumi.ResourceOptions
) -> pulumi.Output[str] | None:
    """The profile of an instance that may read the store's bundles and nothing else; None without a store in S3."""
    if settings.store is None or settings.store.endpoint:
        return None
    name = aws_name(stack, pod.base, ec2.region)
    trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
    role = aws.iam.Role(f"{pod.base}-role", name=name, assume_role_policy=_policy(trust), tags=tags, opts=opts)
    partition = aws.get_partition_output(opts=pulumi.InvokeOutputOptions(parent=opts.parent)).partition
    # A prefix may hold a star, which is any text in a policy.
    folder = settings.store.folder.replace("*", "${*}")
    bundles = pulumi.Output.format("arn:{0}:s3:::{1}/{2}*", partition, settings.store.bucket, folder)
    aws.iam.RolePolicy(
        f"{pod.base}-store",
        name="store",
        role=role.name,
        policy=bundles.apply(lambda arn: _policy({"Effect": "Allow", "Action": "s3:GetObject", "Resource": arn})),
        opts=opts,
    )
    profile = aws.iam.InstanceProfile(f"{pod.base}-profile", name=name, role=role.name, tags=tags, opts=opts)
    profile_name: pulumi.Output[str] = profile.name
    return profile_name


def _policy(statement: Mapping[str, object]) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]}, sort_keys=True)


def _user_data(host_key: HostKey) -> pulumi.Output[str]:
    """What cloud-init is told: this host key and no other, and what an AMI may lack. JSON is YAML.

    podctl makes its venv with the first package; Triton, which vLLM compiles kernels with, needs Python.h of the other.
    """
    private: pulumi.Output[str] = pulumi.Output.secret(host_key.private_key)
    keys = {"ed25519_private": private, "ed25519_public": host_key.public_key}
    config = pulumi.Output.json_dumps(
        {
            "ssh_deletekeys": True,
            "ssh_keys": keys,
            "package_update": True,
            "packages": ["python3-venv", "python3-dev"],
        },
        sort_keys=True,
    )
    return pulumi.Output.concat("#cloud-config\n", config)


def _warn_of_the_open(ec2: Ec2, pod: Pod, opts: pulumi.ResourceOptions) -> None:
    # `pulumi up` runs the program twice.
    if not pulumi.runtime.is_dry_run():
        return
    for key, cidr, who in (
        ("sshCidr", ec2.ssh_cidr, "may try to log in"),
        ("engineCidr", ec2.engine_cidr, "may ask the engine"),
    ):
        if cidr in _ANYWHERE:
            pulumi.log.warn(
                f"ec2.{key} of {printable(pod.base)} is {cidr}: the whole internet {who}. Name the network it is for.",
                resource=opts.parent,
            )
