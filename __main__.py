"""A stack file in, pods that serve its models out."""

import gc

import pulumi

from components.head_start import head_start

head_start()  # the providers load while we do, so before the rest is imported
# Of many adapters it looks through all objects again and again, a fifth of a preview, and the program ends soon anyhow.
gc.disable()

from components.core.errors import UserError, printable_text  # noqa: E402
from components.deployment import Deployment  # noqa: E402
from components.described import Described  # noqa: E402
from components.settings import program_config  # noqa: E402

stack = pulumi.get_stack()
try:
    described = Described(program_config(), stack)
    deployment = Deployment("lora-pods", described, stack)
except UserError as error:
    raise pulumi.RunError(printable_text(error)) from None

pulumi.export("engines", deployment.engines)
