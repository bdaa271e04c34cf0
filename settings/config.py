"""What a deployment is configured to be. Frozen: made once from flags and environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from settings.errors import ConfigError

BLOCK_SIZES = (8, 16, 32, 2048, 8192)
GIB = 2**30
MAX_BODY_BYTES = 10 * 1024 * 1024
MAX_CONCURRENT_REQUESTS = 2048
KV_TRANSPORTS = ("device", "shm", "jax", "grpc")
"""How KV moves between workers, best first; the names are kvtransfer's."""


@dataclass(frozen=True, slots=True)
class Topology:
    """How many workers of each role; `--disagg_topo=3,1` is 3 prefill and 1 decode."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> Topology:
        """From "P,D".

        Raises:
            ConfigError: not two whole numbers of at least 1.
        """
        parts = text.split(",")
        try:
            prefill, decode = (int(part) for part in parts)
        except ValueError:
            raise ConfigError(
                f"--disagg_topo={text}: two whole numbers are wanted, prefill workers and "
                "decode workers, such as 3,1"
            ) from None
        if prefill < 1 or decode < 1:
            raise ConfigError(
                f"--disagg_topo={text}: at least 1 prefill and 1 decode worker are needed"
            )
        return cls(prefill, decode)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and in what form.

    `max_model_len` and `sliding_window` None are what config.json says; `dtype` "auto" is the
    platform's choice; `quantization` is "none", or "int8" for weights of 8 bits;
    `generation_config` "ignore" leaves generation_config.json out; `tokenizer_mode` is
    checkpoint.tokenizer's.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    served_model_name: str | None = None
    load_format: str = "auto"
    dtype: str = "auto"
    quantization: str = "none"
    max_model_len: int | None = None
    sliding_window: int | None = None
    seed: int = 0
    generation_config: str = "auto"
    tokenizer_mode: str = "auto"
    trust_remote_code: bool = False

    @property
    def needs_weights(self) -> bool:
        """Whether workers read the checkpoint's weights."""
        return self.load_format != "dummy"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a worker's engine batches and how much KV it holds.

    The paddings and max_decode_seqs are None until `with_platform_defaults` has filled them.
    `kv_cache_dtype` "auto" is the weights' dtype, `kernels` "auto" the platform's own;
    `prefill_chunk_tokens` None is the engine's choice, `max_exported_fraction` engine.limits'.
    """

    tensor_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    kernels: str = "auto"
    warmup: bool = True
    max_prefill_seqs: int = 1
    prefill_seqs_padding: int = 8
    prefill_len_padding: int | None = None
    decode_seqs_padding: int | None = None
    decode_blocks_padding: int | None = None
    max_decode_seqs: int | None = None
    enable_chunked_prefill: bool = False
    prefill_chunk_tokens: int | None = None
    hbm_utilization_factor: float = 0.9
    num_blocks: int | None = None
    block_size: int = 32
    max_queued_requests: int = 1024
    max_exported_fraction: float = 0.5
    enable_prefix_cache_hbm: bool = False


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """EngineConfig's batching with every default decided."""

    max_prefill_seqs: int
    prefill_seqs_padding: int
    prefill_len_padding: int
    decode_seqs_padding: int
    decode_blocks_padding: int
    max_decode_seqs: int


_ACCELERATOR = BatchSizes(1, 8, 512, 8, 128, 256)  # Hex-LLM's defaults
_CPU = BatchSizes(1, 8, 64, 1, 8, 32)


def with_platform_defaults(config: EngineConfig, platform: str) -> BatchSizes:
    """Fill what was left unset, by platform ("cpu", "tpu", "gpu")."""
    defaults = _CPU if platform == "cpu" else _ACCELERATOR
    given = {
        name: value
        for name in BatchSizes.__dataclass_fields__
        if (value := getattr(config, name)) is not None
    }
    return replace(defaults, **given)


def default_kv_transports(platform: str) -> tuple[str, ...]:
    """Those of an unset --kv_transports, by platform. On CPU jax gains nothing over gRPC."""
    return tuple(name for name in KV_TRANSPORTS if name != "jax" or platform != "cpu")


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """Where the router listens, which routes Vertex AI calls, and whom it lets in.

    Attributes:
        api_keys: one of them is wanted of each request; none leaves the API open.
        allowed_origins: web sites whose scripts may ask, or "*".
        admin: whether `/admin` is there.
        admin_keys: one of them is wanted of each request to it; none leaves it open.
        ssl_certfile, ssl_keyfile: PEM files; None is plain HTTP, or a key in the certificate's.
    """

    host: str
    port: int
    predict_route: str = "/generate"
    health_route: str = "/ping"
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    max_concurrent_requests: int = MAX_CONCURRENT_REQUESTS
    max_body_bytes: int = MAX_BODY_BYTES
    admin: bool = False
    admin_keys: tuple[str, ...] = field(default=(), repr=False)

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """A conversation at a terminal with a server at `url`; None is the server's default."""

    url: str
    model: str | None
    system: str | None
    max_tokens: int | None
    temperature: float | None
    api_key: str | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class LifeConfig:
    """What is done about ends, wanted or not. Times are in seconds.

    Attributes:
        drain_timeout_s: how long what runs may go on after a process was told to end.
        worker_wait_s: how long a request waits for a lost worker to come back.
        max_lost_attempts: a request fails when so many of its attempts in a row were lost.
        step_limit_s: a step that takes longer hangs, and its worker ends.
        decode_may_prefill: decode workers prefill as well when no prefill worker is left.
        restart_wait_s: before a worker that has died is started again the first time.
        start_limit_s: a worker that is not ready and shows no sign of life for so long is killed
            by its launcher; 0 is never.
    """

    drain_timeout_s: float = 25.0
    worker_wait_s: float = 30.0
    max_lost_attempts: int = 5
    step_limit_s: float = 300.0
    restart_wait_s: float = 1.0
    start_limit_s: float = 600.0
    decode_may_prefill: bool = False


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """A whole deployment on this machine.

    `topology` None is one colocated worker; of each worker there are `data_parallel_size`;
    `worker_distributed_method` None leaves the choice between mp and thread to the launcher;
    `kv_transports` and `jax_profile_dir` are WorkerConfig's; `jax_platforms` "" leaves the choice
    to jax; `visible_devices` are those of settings.environment.
    """

    model: ModelConfig
    engine: EngineConfig
    http: HttpConfig
    topology: Topology | None
    log_level: str
    cache: Path
    data_parallel_size: int = 1
    worker_distributed_method: str | None = None
    kv_transports: tuple[str, ...] | None = None
    jax_profile_dir: Path | None = None
    life: LifeConfig = field(default_factory=LifeConfig)
    jax_platforms: str = ""
    visible_devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker process, or what several workers in one process have in common.

    Attributes:
        address: where it listens: "unix:/path" or "host:port". Beside a Unix socket lies that
            of the shared-memory transport.
        cpus: cores to run on; None leaves the choice to the system.
        exit_with_stdin: end when standard input closes, so that no worker outlives the
            process that started it.
        kv_transports: those it offers its KV by and fetches KV by, best first; None is
            `default_kv_transports`.
        jax_profile_dir: where a trace is written when SIGUSR2 asks for one; None: never.
    """

    model: ModelConfig
    engine: EngineConfig
    address: str
    advertise: str | None
    cpus: tuple[int, ...] | None
    exit_with_stdin: bool
    log_level: str
    cache: Path
    kv_transports: tuple[str, ...] | None = None
    jax_profile_dir: Path | None = None
    life: LifeConfig = field(default_factory=LifeConfig)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """A router that finds its workers at fixed addresses."""

    model: ModelConfig
    http: HttpConfig
    workers: tuple[str, ...]
    log_level: str
    cache: Path
    life: LifeConfig = field(default_factory=LifeConfig)
