import ast
import re

import pynvml
import pytest
import yaml

from sp_bench import hardware


@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4e12),
        ("NVIDIA H200", "float16", 989.4e12),
        ("NVIDIA H200", "float32", 66.9e12),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
        ("NVIDIA H100 PCIe", "bfloat16", None),
        ("NVIDIA H200 NVL", "bfloat16", None),
        ("NVIDIA H200", "float64", None),
        ("a processor", "float32", None),
    ],
)
def test_a_peak_rate_has_a_source_or_is_none(device, dtype, expected):
    assert hardware.peak_flops(device, dtype) == expected


@pytest.mark.parametrize(
    ("device", "gib"),
    [("NVIDIA H200", 139.8), ("NVIDIA H100 80GB HBM3", 79.2)]
    + [(name, None) for name in ("NVIDIA GH200 480GB", "NVIDIA H200 NVL", "NVIDIA H100 NVL", "NVIDIA H100 PCIe")],
)
def test_only_devices_whose_memory_is_known_have_one(device, gib):
    found = hardware.device_bytes(device)
    assert found == (None if gib is None else round(gib * 2**30))


def test_only_listed_variables_are_recorded():
    variables = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "1",
        "NVTE_FUSED_ATTN": "1",
        "HOME": "/root",
        "AWS_SECRET": "s",
    }
    recorded = {"NCCL_DEBUG": "INFO", "NVTE_FUSED_ATTN": "1", "OMP_NUM_THREADS": "1"}
    assert hardware.recorded_variables(variables) == recorded


@pytest.mark.parametrize(
    "name", ["NCCL_SOCKET_IFNAME", "NCCL_COMM_ID", "GLOO_X", "TORCH_NCCL_Y", "NVTE_CUDA_INCLUDE_DIR"]
)
def test_of_other_variables_a_hash_of_the_value_is_recorded(name):
    def recorded(value):
        return hardware.recorded_variables({name: value})[name]

    assert re.fullmatch("sha256:[0-9a-f]{8}", recorded("mlx5_7"))
    assert recorded("mlx5_7") == recorded("mlx5_7") != recorded("mlx5_8")
    assert hardware.public_value(name, recorded("mlx5_7")) == recorded("mlx5_7")  # a row that is read again
    assert recorded("\udcff") != recorded("")


def test_all_variables_that_our_fabrics_set_are_recorded_with_their_values():
    for path in (hardware.PACKAGE.parent / "conf" / "fabric").glob("*.yaml"):
        variables = yaml.safe_load(path.read_text())["env"]
        assert hardware.recorded_variables(variables) == dict(sorted(variables.items()))


def test_the_environment_of_a_failed_trial_fits_its_column(make_config):
    import pyarrow as pa

    from sp_bench.rows import schema

    captured = hardware.environment("cpu", {"NCCL_DEBUG": "INFO"})
    (stored,) = pa.array([captured], type=schema.ENVIRONMENT).to_pylist()
    assert stored["cpu"] == hardware.cpu_model()
    assert stored["packages"] == list(hardware.package_versions().items())
    assert stored["env"] == [("NCCL_DEBUG", "INFO")]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("1", "b"),
        ("2,0", "ca"),
        ("", ""),
        ("GPU-b", "b"),
        ("0,7,1", "a"),
        ("-1", ""),
        ("0,0", ""),
        ("1,0,1", ""),
        ("00", "a"),
    ],
)
def test_cuda_visible_devices_leaves_what_cuda_would_show(visible, expected):
    devices = [hardware.Gpu(letter, f"GPU-{letter}") for letter in "abc"]
    assert "".join(gpu.name for gpu in hardware.visible(devices, visible)) == expected


def test_each_peak_rate_is_written_beside_its_source():
    source = (hardware.PACKAGE / "hardware.py").read_text()
    (table,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "PEAK_FLOPS"
    )
    text = ast.get_source_segment(source, table)
    assert str(text).count("datasheet") == len(hardware.PEAK_FLOPS)


@pytest.mark.parametrize("code", [18, 999, 4, 15])
def test_a_driver_that_does_not_answer_is_a_problem_in_words(monkeypatch, code):
    def fails() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", fails)
    found = hardware.gpus()
    assert found is not None
    assert found.devices == ()
    assert "the NVIDIA driver does not answer (NVML: " in found.problem
    assert hardware.processes_on_gpus(2) == []
    assert hardware.device_model("cuda") == "none"


@pytest.fixture
def two_gpus(monkeypatch):
    """GPU 0 is in MIG mode, GPU 1 is whole and of a kind that has no such mode."""

    def mode(index: int) -> list[int]:
        if index:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [pynvml.NVML_DEVICE_MIG_ENABLE, pynvml.NVML_DEVICE_MIG_ENABLE]

    answers = {
        "Init": lambda: None,
        "Shutdown": lambda: None,
        "SystemGetDriverVersion": lambda: "580",
        "DeviceGetCount": lambda: 2,
        "DeviceGetHandleByIndex": lambda i: i,
        "DeviceGetName": lambda i: f"H{i}00",
        "DeviceGetUUID": lambda i: f"GPU-{i}",
        "DeviceGetCudaComputeCapability": lambda i: (9, 0),
        "DeviceGetMigMode": mode,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (None, "GPU-0 is in MIG mode, and sp_bench does not measure slices; name whole GPUs by UUID"),
        ("0", "GPU-0 is in MIG mode"),
        ("MIG-377e0049-554c-540b-93c6-d0976f8426cb", "CUDA_VISIBLE_DEVICES names a MIG slice"),
        ("GPU-1", ""),
    ],
)
def test_a_gpu_in_slices_is_refused_by_name_and_a_whole_one_beside_it_is_not(two_gpus, monkeypatch, wanted, words):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if wanted:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
    found = hardware.gpus()
    assert found is not None
    assert found.problem.startswith(words)
    assert [gpu.uuid for gpu in found.devices] == ([] if words else ["GPU-1"])
