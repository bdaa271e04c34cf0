"""Files of a repository or bucket that are downloaded, from the model's top folder only.

Pickled weights never are, nor second copies of the weights under other names.
"""

TEXT_PATTERNS = ("*.json", "*.jinja", "tokenizer.model")
"""Configuration, tokenizer and chat template."""
ALL_PATTERNS = ("model*.safetensors", *TEXT_PATTERNS)
