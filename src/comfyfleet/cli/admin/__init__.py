"""`comfyfleet admin`: the operators' API from the command line, one module per group."""

from cyclopts import App

from comfyfleet.cli import helps
from comfyfleet.cli.admin import (
    audit,
    dispatches,
    effects,
    fleets,
    jobs,
    ledger,
    operators,
    submit,
    tenants,
    upkeep,
    workers,
    workflows,
)

app = App(name="admin", help=helps.ADMIN, help_format="markdown")
for _group in (fleets, workflows, effects, workers, tenants, ledger, dispatches, jobs, operators):
    app.command(_group.app)
app.command(submit.submit)
app.command(audit.audit)
app.command(upkeep.maintenance)
app.command(upkeep.poisoned)
app.command(upkeep.reconcile)
