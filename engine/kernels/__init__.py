"""The operations of the engine, an implementation per platform."""
