"""A stack file in, pods that serve its models out."""

import pulumi

from components.core.errors import UserError
from components.deployment import Deployment, Described
from components.settings import program_config

try:
    described = Described(program_config())
except UserError as error:
    raise pulumi.RunError(str(error)) from None

deployment = Deployment("lora-pods", described, pulumi.get_stack())
pulumi.export("engines", deployment.engines)
