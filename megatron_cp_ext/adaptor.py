"""Importing this module hooks the features into Megatron's argument parsing.

`import megatron_cp_ext.adaptor` as the first line of a training script, or
`-m megatron_cp_ext.run script.py`, is all it takes. Only `parse_args`, `validate_args` and
`validate_yaml` are wrapped here. Everything else waits until the arguments are validated, and
is decided from them.
"""

from megatron_cp_ext.features.session import install

install()
