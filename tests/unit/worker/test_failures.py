"""What an error means: the job's fault, the backend's, and what is to be done."""

from datetime import UTC, datetime
from uuid import UUID

import pytest

from comfyfleet.api.worker import Fail, Job, Lacking, Requeue
from comfyfleet.comfy.answers import refusal_from
from comfyfleet.comfy.events import Failed
from comfyfleet.comfy.messages import parse_failure
from comfyfleet.errors import (
    AccessDenied,
    CreditsExhausted,
    FileGone,
    FleetError,
    InvalidInput,
    LimitExceeded,
    OutcomeUnknown,
    RunFailed,
    RunLost,
    RunStalled,
    RunTimedOut,
    ServerUnavailable,
    Unavailable,
    UnexpectedAnswer,
)
from comfyfleet.worker.failures import BackendCondition, find_backend_fault, outcome_of_error

TOKEN = UUID("7a3c2f60-0000-4000-8000-0000000000aa")
JOB = Job(
    dispatch_id=1,
    job_id=TOKEN,
    lease_token=TOKEN,
    lease_number=1,
    attempt=1,
    lease_expires_at=datetime(2026, 1, 1, tzinfo=UTC),
    lease_seconds=900,
    provider="self_hosted",
    workflow_slug="w",
    prompt={},
)


@pytest.mark.parametrize(
    ("exception_type", "message", "reason", "condition"),
    [
        ("torch.OutOfMemoryError", "Allocation on device", "out_of_memory", None),
        ("torch.cuda.OutOfMemoryError", "", "out_of_memory", None),
        ("RuntimeError", "CUDA out of memory. Tried to allocate 20 MiB", "out_of_memory", None),
        ("RuntimeError", "CUDA error: out of memory", "out_of_memory", None),
        ("MemoryError", "", "out_of_memory", None),
        ("RuntimeError", "MPS backend out of memory (MPS allocated: 9 GB", "out_of_memory", None),
        ("RuntimeError", "CUDA error: device-side assert triggered", "backend_fault", "poisoned"),
        ("torch.AcceleratorError", "CUDA error: unknown", "backend_fault", "poisoned"),
        ("RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "backend_fault", "poisoned"),
        ("RuntimeError", "Found no NVIDIA driver on your system", "backend_fault", "poisoned"),
        ("RuntimeError", "Triton Error [CUDA]: an illegal memory access was encountered", "backend_fault", "poisoned"),
        ("cupy_backends.cuda.api.runtime.CUDARuntimeError", "cudaErrorIllegalAddress: an illegal memory", "backend_fault", "poisoned"),
        ("RuntimeError", "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried", "out_of_memory", None),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out_of_memory", None),
        ("OSError", "[Errno 28] No space left on device", "disk_full", None),
        ("OSError", "[Errno 12] Cannot allocate memory", "out_of_memory", None),
    ],
)  # fmt: skip
def test_the_backends_own_faults_are_known_by_what_it_says(
    exception_type: str, message: str, reason: str, condition: str | None
) -> None:
    fault = find_backend_fault(exception_type, message)
    assert fault is not None
    assert (fault.reason, fault.condition) == (reason, condition)


@pytest.mark.parametrize(
    ("exception_type", "message"),
    [
        ("ValueError", "tensor sizes don't match"),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied"),
        ("KeyError", "'CUDA'"),
        ("RuntimeError", "the picture is out of memory of mankind"),
        # Nodes that quote a text of the prompt.
        ("ValueError", "Cannot convert string to number: 'CUDA error: '"),
        ("ValueError", "CUDA error: device-side assert triggered"),
        ("Exception", "CUDA out of memory"),
        ("KeyError", "'No space left on device'"),
        ("json.decoder.JSONDecodeError", "illegal memory access"),
        ("RuntimeError", "Shader compilation failed:\nCUDA error: 700"),
        ("RuntimeError", "no such file: CUDA_ERROR_UNKNOWN"),
        ("", "CUDA error: device-side assert triggered"),
    ],
)
def test_anything_else_is_the_prompts_fault(exception_type: str, message: str) -> None:
    assert find_backend_fault(exception_type, message) is None
    failed = parse_failure(
        {"prompt_id": "run", "exception_type": exception_type, "exception_message": message}
    )
    assert isinstance(failed, Failed)
    report = outcome_of_error(RunFailed(message, failed=failed), JOB).report
    assert isinstance(report, Fail)


def test_a_check_of_a_node_that_quotes_a_text_names_no_missing_node_type() -> None:
    says = "Cannot execute because node KSampler does not exist."
    error = {"type": "prompt_outputs_failed_validation", "message": "Prompt outputs failed"}
    problem = {
        "type": "custom_validation_failed",
        "message": says,
        "details": says,
        "extra_info": {},
    }
    answer = {"error": error, "node_errors": {"3": {"class_type": "Custom", "errors": [problem]}}}
    assert isinstance(outcome_of_error(refusal_from(answer, {}), JOB).report, Fail)


@pytest.mark.parametrize(
    ("error", "reason", "condition"),
    [
        (RunLost("gone"), "backend_down", None),
        (ServerUnavailable("down"), "backend_down", BackendCondition.DOWN),
        (RunStalled("stuck"), "backend_fault", BackendCondition.HUNG),
        (CreditsExhausted("none"), "backend_down", BackendCondition.CLOSED),
        (AccessDenied("no"), "backend_down", BackendCondition.CLOSED),
        (UnexpectedAnswer("what"), "backend_fault", None),
        (Unavailable("the store"), "backend_fault", None),
        (RunFailed("cancelled by somebody"), "backend_fault", None),
    ],
)
def test_trouble_around_the_job_hands_it_back(
    error: FleetError, reason: str, condition: BackendCondition | None
) -> None:
    outcome = outcome_of_error(error, JOB)
    assert isinstance(outcome.report, Requeue)
    assert outcome.report.reason == reason
    assert error.message in (outcome.report.detail or "")
    assert (outcome.fault.condition if outcome.fault else None) == condition


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OutcomeUnknown("who knows"), "unknown_outcome"),
        (RunTimedOut("too long"), "run_limit"),
        (LimitExceeded("too large"), "limit_exceeded"),
        (InvalidInput("no such node"), "invalid_input"),
    ],
)
def test_trouble_of_the_job_fails_it(error: Exception, code: str) -> None:
    report = outcome_of_error(error, JOB).report
    assert isinstance(report, Fail)
    assert isinstance(report.error, dict)
    assert report.error["code"] == code
    assert report.error["exception_message"]


def test_a_failed_node_is_told_as_it_came() -> None:
    failed = Failed("run", "no cat\n", "7", "LoadCat", "ValueError", ("line 1", "line 2"))
    report = outcome_of_error(RunFailed("no cat", failed=failed), JOB).report
    assert isinstance(report, Fail)
    assert report.error == {
        "code": "run_failed",
        "exception_message": "no cat\n",
        "exception_type": "ValueError",
        "node_id": "7",
        "node_type": "LoadCat",
        "traceback": ["line 1", "line 2"],
    }


def test_a_report_quotes_only_so_much_of_an_error() -> None:
    large = "x" * 1_000_000
    failed = Failed("run", large, "7", "LoadCat", "ValueError", (large,) * 1_000)
    report = outcome_of_error(RunFailed(large, failed=failed), JOB).report
    assert len(report.model_dump_json()) < 300_000


def test_a_failure_that_the_cloud_calls_its_own_is_tried_again() -> None:
    failed = Failed("run", "a machine was lost", retryable=True)
    assert isinstance(outcome_of_error(RunFailed("x", failed=failed), JOB).report, Requeue)


def test_a_refusal_names_the_node() -> None:
    error = {"type": "invalid", "message": "Prompt outputs failed validation"}
    problem = {"type": "value", "message": "Value -5", "details": "", "extra_info": {}}
    answer = {"error": error, "node_errors": {"3": {"class_type": "Size", "errors": [problem]}}}
    report = outcome_of_error(refusal_from(answer, {}), JOB).report
    assert isinstance(report, Fail)
    assert isinstance(report.error, dict)
    assert (report.error["node_id"], report.error["node_type"]) == ("3", "Size")
    assert report.error["problems"] == ["node 3 (Size): Value -5"]


def test_files_of_kept_results_that_are_gone_are_made_anew() -> None:
    outcome = outcome_of_error(FileGone("gone"), JOB)
    assert outcome.fault is not None
    assert outcome.fault.frees


def test_an_error_that_nobody_thought_of_is_puzzling() -> None:
    outcome = outcome_of_error(ZeroDivisionError("oops"), JOB)
    assert outcome.is_unexpected
    assert isinstance(outcome.report, Requeue)


MODEL_IS_MISSING = {
    "error": {"type": "prompt_outputs_failed_validation", "message": "Prompt outputs failed"},
    "node_errors": {
        "1": {
            "class_type": "CheckpointLoaderSimple",
            "errors": [
                {
                    "type": "value_not_in_list",
                    "message": "Value not in list",
                    "details": "ckpt_name: 'a.safetensors' not in []",
                    "extra_info": {"input_name": "ckpt_name", "received_value": "a.safetensors"},
                }
            ],
        }
    },
}
NODE_IS_MISSING = {
    "type": "missing_node_type",
    "message": "Node 'Fancy' not found.",
    "extra_info": {"node_id": "4", "class_type": "FancyNode"},
}
NODE_IS_MISSING_AS_BEFORE = {
    "type": "invalid_prompt",
    "message": "Cannot execute because node FancyNode does not exist.",
    "details": "Node ID '#4'",
    "extra_info": {"node_id": "4"},
}


@pytest.mark.parametrize(
    ("answer", "node_types", "models"),
    [
        (MODEL_IS_MISSING, (), (("CheckpointLoaderSimple.ckpt_name", "a.safetensors"),)),
        ({"error": NODE_IS_MISSING}, ("FancyNode",), ()),
        ({"error": NODE_IS_MISSING_AS_BEFORE}, ("FancyNode",), ()),
    ],
)
def test_what_a_backend_lacks_is_for_another_to_run(
    answer: dict[str, object], node_types: tuple[str, ...], models: tuple[tuple[str, str], ...]
) -> None:
    outcome = outcome_of_error(refusal_from(answer, {}), JOB)
    assert isinstance(outcome.report, Requeue)
    assert outcome.report.reason == "backend_lacks"
    assert outcome.report.lacking == Lacking(node_types=node_types, models=models)
    assert outcome.fault is not None
    assert outcome.fault.changes_lists
    assert outcome.fault.condition is None
