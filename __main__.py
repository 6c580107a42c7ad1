"""A stack file in, pods that serve its models out."""

import pulumi

from components.core.errors import UserError, printable_text
from components.deployment import Deployment
from components.described import Described
from components.settings import program_config

stack = pulumi.get_stack()
try:
    described = Described(program_config(), stack)
    deployment = Deployment("lora-pods", described, stack)
except UserError as error:
    raise pulumi.RunError(printable_text(error)) from None

pulumi.export("engines", deployment.engines)
