"""MLflow's server, closed to pages of other sites: `mlflow server --app-name pedigree`.

MLflow checks `Host` itself, but it trusts the pages of every port of loopback, such as a notebook's.
"""

import os

from mlflow.server.fastapi_app import app

from workflows.servers.same_origin import SameOriginOnly, allowed_hosts


def create_app() -> SameOriginOnly:
    """Return the ASGI application; an entry point of the group `mlflow.app`."""
    return SameOriginOnly(app, allowed_hosts(os.environ))
