"""The `merge` job: a policy that is an adapter becomes one plain model, for those who cannot or need not know of adapters.

It is added up as by training that exports a merged policy, and from the same numbers.
"""

from training.contract.events import EventWriter
from training.contract.job import Job
from training.contract.store import Made
from training.contract.weights import weights_fingerprint, weights_identity
from training.distributed import Group
from training.model.adapter import adapter_dtype, load_policy, merge_adapter
from training.model.load import save_model


def run(job: Job, group: Group, events: EventWriter) -> Made:
    """Write the merged model into `job.staging`, in the precision the adapter was trained in. Raises ModelError."""
    events.phase("merge the adapter into its base")
    policy = job.inputs["policy"]
    model = load_policy(policy, job.inputs["reference_model"], adapter_dtype(policy.folder), group.device)
    merge_adapter(model)
    save_model(model, job.staging)
    return Made(weights_fingerprint(weights_identity(job.staging)))
