"""One decoder, driven by traits."""
