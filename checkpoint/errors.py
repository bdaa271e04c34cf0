"""What can go wrong with a model folder, as errors a person can act on.

    ValueError
    ├── CheckpointError      the folder, hub or file is at fault
    └── ChatTemplateError    these messages do not fit this model's chat template

The first ends a start; the second answers one request.
"""

from __future__ import annotations


class CheckpointError(ValueError):
    """A model cannot be found, fetched or read. The message names what and where."""


class ChatTemplateError(ValueError):
    """A chat template refused or failed on the messages it was given."""
