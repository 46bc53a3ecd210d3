"""The `merge` job: merge a policy's adapter into its base model. The result loads without peft."""

from training.contract.protocol.events import EventWriter
from training.contract.protocol.job import Job
from training.contract.store.store import JobResult
from training.distributed import Group
from training.model.adapter import write_merged


def run(job: Job, group: Group, events: EventWriter) -> JobResult:
    """Write the merged model into `job.staging`. Raises ModelError."""
    events.phase("merge the adapter into its base")
    return JobResult(write_merged(job.inputs["policy"], job.inputs["reference_model"], job.staging))
