"""The suites of other projects that the driver knows, and the differences that are expected."""

from tests.external.suites import COMFYUI, Expected, Suite, Way

# With two backends, the second prompt may run where the first one has not been.
ONE_PROCESS = "The test inspects the cache of a single ComfyUI."
TWO = (Way.TWO_BACKENDS,)

EXECUTION = Suite(
    name="comfyui",
    variable=COMFYUI,
    tests=("tests/execution",),
    options=("--port={port}", "--output_dir=output"),
    starts_servers=True,
    timed=(
        "*::test_async_lazy_evaluation*",
        "*::test_async_caching_behavior*",
        "*::test_async_with_dynamic_prompts*",
        "*::test_multiple_async_parallel_execution*",
        "*::test_parallel_sleep_nodes*",
        "*::test_parallel_sleep_expansion*",
        # The gateway waits up to 2 s for the check of a backend.
        "*::test_validation_error*",
        "*::test_async_valid*",
    ),
    expected=(
        Expected(
            "*::TestExecution::test_full_cache[server*",
            "SaveImage runs again: each job has files of its own. See gateway-differences.md.",
        ),
        Expected("*::TestAsyncNodes::test_async_caching_behavior*", ONE_PROCESS, TWO),
        Expected("*::TestAsyncNodes::test_async_resource_cleanup*", ONE_PROCESS, TWO),
        Expected("*::TestExecution::test_custom_is_changed*", ONE_PROCESS, TWO),
        Expected("*::TestExecution::test_is_changed_with_outputs*", ONE_PROCESS, TWO),
        Expected("*::TestExecution::test_partial_cache*", ONE_PROCESS, TWO),
    ),
)
KRITA = Suite(
    name="krita",
    variable="EXTERNAL_KRITA",
    tests=("tests/test_client.py", "{clients}/krita_four_jobs.py"),
    options=("-p", "krita_settings"),
    address_fixture="comfy_server",
    passthrough=("/api/etn",),
)
SIMPLIFIED = Suite(
    name="comfy_api_simplified",
    variable="EXTERNAL_COMFY_API_SIMPLIFIED",
    tests=("tests/test_comfy_api.py",),
    environ={"COMFY_SERVER_URL": "{url}/"},
)
COMFYSCRIPT = Suite(
    name="comfyscript",
    variable="EXTERNAL_COMFYSCRIPT",
    tests=("{clients}/comfyscript_positions.py",),
    environ={"COMFYSCRIPT_SERVER": "{url}/"},
    imports=("src",),
)
SUITES = (EXECUTION, KRITA, SIMPLIFIED, COMFYSCRIPT)
