"""A handler as it is written for RunPod serverless."""

import runpod
from runpod.serverless.utils.rp_validator import validate

SCHEMA = {"steps": {"type": int, "required": True}}


def handler(job):  # type: ignore[no-untyped-def]
    checked = validate(job["input"], SCHEMA)
    if "errors" in checked:
        yield {"error": "; ".join(checked["errors"])}
        return
    for step in range(checked["validated_input"]["steps"]):
        runpod.serverless.progress_update(job, f"step {step}")
        yield {"step": step}


if __name__ == "__main__":
    runpod.serverless.start({"handler": handler, "return_aggregate_stream": True})
