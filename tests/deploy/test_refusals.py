"""What cannot be served is refused within seconds, with a message and without a traceback."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.deploy.conftest import Launch, give_weights
from tests.deploy.launch import HEX_LLM, HEXSERVE, Launched

SERVE = (*HEXSERVE, "serve", "--port=0")


@pytest.fixture
def llama_folder(fake_folder: Path, tmp_path: Path) -> Path:
    """A tiny Llama with the fake model's tokenizer."""
    return give_weights(shutil.copytree(fake_folder, tmp_path / "llama"), "head_dim")


def assert_refused(process: Launched, code: int, *messages: str) -> None:
    assert process.exit_code() == code, process.output
    for message in messages:
        assert message in process.output
    assert "Traceback" not in process.output
    assert "ready at" not in process.output


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (SERVE, [], "--model is missing"),
        (SERVE, ["--model=fake", "--disagg_topo=3"], "--disagg_topo=3: two whole numbers"),
        (SERVE, ["--model=fake", "--disagg_topo=0,1"], "--disagg_topo=0,1: at least 1"),
        (SERVE, ["--model=fake", "--enable-lora"], "--enable_lora=true is not supported yet"),
        (
            SERVE,
            [
                "--model=fake",
                "--disagg_topo=1,1",
                "--worker_distributed_method=mp",
                "--kv_transports=device",
            ],
            "--kv_transports=device reaches no other process",
        ),
        (HEX_LLM, ["--model=fake", "--num_hosts=2"], "--num_hosts=2 is not supported yet"),
        (SERVE, ["--model=fake", "--host=192.0.2.1"], "--host=192.0.2.1"),
        (SERVE, ["--model=/no/such/folder"], "/no/such/folder: no such folder"),
        (SERVE, ["--model=gs://"], "gs://: gs://bucket/folder is wanted"),
        (SERVE, ["--model=fake", "--tokenizer=/no/such"], "/no/such: no such folder"),
    ],
)
def test_a_launcher_refuses_before_it_starts_workers(
    launch: Launch, command: tuple[str, ...], flags: list[str], message: str
) -> None:
    launcher = launch(*command, *flags)
    assert_refused(launcher, 2, f"hexserve: {message}")
    assert ": process " not in launcher.output


def test_a_port_in_use_is_refused_before_workers_start(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launcher = launch(*HEXSERVE, "serve", "--model=fake", f"--port={port}")
        assert_refused(launcher, 2, f"hexserve: --host=127.0.0.1 --port={port}: Address already")
        assert ": process " not in launcher.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"model_type": "hexserve_fake"}', "'vocab_size' is missing"),
    ],
)
def test_a_broken_configuration_is_refused(
    launch: Launch, fake_folder: Path, scratch: Path, text: str, message: str
) -> None:
    (fake_folder / "config.json").write_text(text)
    launcher = launch(*SERVE, f"--model={fake_folder}")
    assert_refused(launcher, 2, f"{fake_folder / 'config.json'}", message)
    assert list(scratch.iterdir()) == []


def test_a_missing_tokenizer_is_refused(launch: Launch, fake_folder: Path) -> None:
    (fake_folder / "tokenizer.json").unlink()
    assert_refused(launch(*SERVE, f"--model={fake_folder}"), 2, "tokenizer.json")


def test_a_tokenizer_of_another_model_is_refused(launch: Launch, fake_folder: Path) -> None:
    change_config(fake_folder, vocab_size=400)
    launcher = launch(*SERVE, f"--model={fake_folder}")
    assert_refused(launcher, 2, "does not belong to this model", "token id 511", "is 400")


def test_a_slow_tokenizer_that_is_not_there_is_refused(launch: Launch) -> None:
    launcher = launch(*SERVE, "--model=fake", "--tokenizer_mode=slow")
    assert_refused(launcher, 2, "tokenizer.model: no such file", "--tokenizer_mode=auto")


def test_a_worker_that_dies_while_starting_ends_the_launcher(launch: Launch, scratch: Path) -> None:
    launcher = launch(*SERVE, "--model=fake", "--max_model_len=99999999", "--disagg_topo=1,1")
    message = "--max_model_len=99999999: the model has 65536 positions"
    assert_refused(launcher, 1, message)
    last = launcher.output.partition("hexserve: ")[2]
    assert "has ended with code 2; its last lines:" in last
    assert message in last
    assert list(scratch.iterdir()) == []


def test_an_unknown_model_type_is_refused(launch: Launch, llama_folder: Path) -> None:
    change_config(llama_folder, model_type="mamba9")
    assert_refused(launch(*SERVE, f"--model={llama_folder}"), 1, "mamba9")


def test_a_half_written_weights_file_is_refused(launch: Launch, llama_folder: Path) -> None:
    path = llama_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    launcher = launch(*SERVE, f"--model={llama_folder}")
    assert_refused(launcher, 1, str(path), "cut off or half written")


def test_missing_weights_are_refused_by_name(launch: Launch, llama_folder: Path) -> None:
    path = llama_folder / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[1]
    del tensors[name]
    save_file(tensors, path)
    launcher = launch(*SERVE, f"--model={llama_folder}")
    assert_refused(launcher, 1, f"1 weights are missing: {name}")


def test_weights_left_over_are_refused_by_name(launch: Launch, llama_folder: Path) -> None:
    path = llama_folder / "model.safetensors"
    save_file(load_file(path) | {"model.extra.weight": np.zeros(3, np.float32)}, path)
    launcher = launch(*SERVE, f"--model={llama_folder}")
    assert_refused(launcher, 1, "1 weights are left over", "model.extra.weight")


def test_weights_that_are_no_numbers_are_refused_by_name(
    launch: Launch, llama_folder: Path
) -> None:
    path = llama_folder / "model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[1]
    tensors[name].flat[3] = np.nan
    save_file(tensors, path)
    launcher = launch(*SERVE, f"--model={llama_folder}")
    assert_refused(launcher, 1, f"{path}: {name} holds NaN or infinity")
    launcher = launch(*SERVE, f"--model={llama_folder}", "--load_format=dummy", "--no_warmup")
    launcher.ready_url()


def test_a_folder_without_weights_is_refused(launch: Launch, llama_folder: Path) -> None:
    (llama_folder / "model.safetensors").unlink()
    assert_refused(launch(*SERVE, f"--model={llama_folder}"), 1, "model.safetensors")


def test_too_few_blocks_for_one_sequence_are_refused(launch: Launch, llama_folder: Path) -> None:
    launcher = launch(*SERVE, f"--model={llama_folder}", "--num_blocks=2")
    assert_refused(
        launcher, 1, "max_model_len=128 needs 4 KV blocks, there are 2", "MiB are missing"
    )
    assert "Lower --max_model_len, or raise --num_blocks" in launcher.output


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        ({}, ["--tensor_parallel_size=3"], "=3 does not divide 4 query heads and 4 KV heads"),
        ({}, ["--tensor_parallel_size=5"], "=5 does not divide"),
        ({"intermediate_size": 33}, ["--tensor_parallel_size=2"], "intermediate_size=33"),
        ({"intermediate_size": 33}, ["--dtype=bfloat16"], "intermediate_size=33"),
        ({"head_dim": 12}, [], "head_dim=12"),
        ({}, ["--dtype=float16"], "--dtype=float16: the CPU kernels take"),
        ({}, ["--kv_cache_dtype=float16"], "--kv_cache_dtype=float16: the CPU kernels take"),
        ({}, ["--sliding_window=8"], "--sliding_window=8: this model's layers have no window"),
        ({"model_type": "new", "auto_map": {}}, ["--trust_remote_code"], "(auto_map), which is"),
    ],
)
def test_a_shape_that_is_not_computed_is_refused(
    launch: Launch, llama_folder: Path, config: dict[str, int], flags: list[str], message: str
) -> None:
    change_config(llama_folder, **config)
    launcher = launch(*SERVE, f"--model={llama_folder}", *flags)
    assert_refused(launcher, 1, message)


def test_a_model_with_arithmetic_tells_its_weights_and_blocks(
    launch: Launch, llama_folder: Path
) -> None:
    launcher = launch(*SERVE, f"--model={llama_folder}", "--num_blocks=64", "--no_warmup")
    launcher.ready_url()
    launcher.wait_for(r"weights: \d+\.\d+ GiB as float32 in")
    launcher.wait_for(r"KV cache: 64 blocks of 32 tokens, 2048 tokens, \d+\.\d+ MiB as float32")
    launcher.wait_for(r"kernels: cpu \(\w+\)")


def test_quantized_weights_are_said_to_be(launch: Launch, llama_folder: Path) -> None:
    flags = ["--num_blocks=64", "--no_warmup", "--quantization=int8"]
    launcher = launch(*SERVE, f"--model={llama_folder}", *flags)
    launcher.ready_url()
    launcher.wait_for(r"weights: \d+\.\d+ GiB as int8 in")


def test_the_kv_cache_has_a_dtype_of_its_own(launch: Launch, llama_folder: Path) -> None:
    flags = ["--num_blocks=64", "--no_warmup", "--kv_cache_dtype=bfloat16"]
    launcher = launch(*SERVE, f"--model={llama_folder}", *flags, "--tensor_parallel_size=2")
    launcher.ready_url()
    launcher.wait_for(r"weights: \d+\.\d+ GiB as float32 in")
    launcher.wait_for(r"MiB as bfloat16 on each of 2 devices")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--address is missing"),
        (["--address=/a/b"], "--address=/a/b: unix:/path or host:port is wanted"),
        (["--address=unix:/no/such/folder/a.sock"], "/no/such/folder: No such file"),
        (["--address=0.0.0.0:8471"], "give --advertise"),
        (["--address=127.0.0.1:1", "--sliding_window=8"], "--sliding_window=8: the fake model"),
        (["--address=127.0.0.1:1", "--kernels=reference"], "--kernels=reference: the fake model"),
        (["--address=127.0.0.1:1", "--quantization=int8"], "--quantization=int8: the fake model"),
        (["--address=127.0.0.1:1", "--quantization=int4"], "invalid choice: 'int4'"),
    ],
)
def test_a_worker_refuses_a_bad_command_line(
    launch: Launch, flags: list[str], message: str
) -> None:
    worker = launch(sys.executable, "-m", "decode_worker", "--model=fake", *flags)
    assert_refused(worker, 2, message)


def test_a_worker_refuses_a_port_in_use(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        worker = launch(
            sys.executable, "-m", "prefill_worker", "--model=fake", f"--address={address}"
        )
        assert_refused(worker, 2, f"--address={address}: ")


def test_a_worker_refuses_a_folder_that_is_open_to_others(launch: Launch, scratch: Path) -> None:
    scratch.chmod(0o755)
    worker = launch(
        sys.executable, "-m", "prefill_worker", "--model=fake", f"--address=unix:{scratch}/p.sock"
    )
    assert_refused(worker, 2, f"{scratch} is open to other users (mode 0755)")


def test_a_router_refuses_a_bad_command_line_and_a_bad_model(launch: Launch) -> None:
    router = (sys.executable, "-m", "router", "--port=0")
    assert_refused(launch(*router, "--model=fake"), 2, "--workers is missing")
    assert_refused(launch(*router, "--model=/no", "--workers=h:1"), 2, "/no: no such folder")
