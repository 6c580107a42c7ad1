"""The `lora` command: what a person or a hook runs outside of pulumi."""
