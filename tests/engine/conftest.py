"""Virtual devices, for tests of tensor parallelism."""

from __future__ import annotations

import jax

jax.config.update("jax_num_cpu_devices", 4)
