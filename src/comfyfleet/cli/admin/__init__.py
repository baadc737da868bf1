"""`comfyfleet admin`: the admin API from the command line, with one module per group.

Internal: may change without notice."""

from cyclopts import App

from comfyfleet.cli import help_texts
from comfyfleet.cli.admin import catalog, fleets, tenants, work

app = App(name="admin", help=help_texts.ADMIN, help_format="markdown")
for _group in (
    fleets.fleets_app,
    catalog.workflows_app,
    catalog.effects_app,
    fleets.workers_app,
    tenants.tenants_app,
    tenants.ledger_app,
    fleets.dispatches_app,
    tenants.jobs_app,
    fleets.operators_app,
):
    app.command(_group)
tenants.tenants_app.command(work.work_app)
app.command(tenants.submit)
app.command(fleets.audit)
app.command(fleets.maintenance)
app.command(fleets.poisoned)
app.command(fleets.reconcile)
