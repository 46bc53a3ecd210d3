"""The `merge` job: merge a policy's adapter into its base model. The result loads without peft."""

from training.contract.protocol.artifacts import AssetName
from training.contract.store.artifact import JobResult
from training.job_context import JobContext
from training.model.adapter import write_merged


def run(context: JobContext) -> JobResult:
    """Write the merged model into the staging folder. Raises ModelError."""
    context.events.phase("merge the adapter into its base")
    inputs = context.inputs
    return JobResult(write_merged(inputs[AssetName.POLICY], inputs[AssetName.REFERENCE_MODEL], context.staging))
