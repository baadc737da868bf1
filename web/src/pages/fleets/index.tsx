/** Lists the fleets with their settings and workflows, and shows how to add workers. */

import { useState } from "react"
import { Link } from "wouter"
import { useQuery } from "@/api"
import type { FleetAnswer, FleetDetails, Matrix } from "@/api/schema"
import { Abilities } from "@/pages/workers/Abilities"
import { countOf, fleetName } from "@/pages/workers/machines"
import { useFleets, useMatrix, useWaiting, useWorkers } from "@/pages/workers/useMachines"
import { Badge, Button, duration, Empty, Loaded, Page, Skeleton, Time } from "@/ui"
import { words as prompts } from "@/words/en/prompts"
import { words } from "@/words/en/workers"
import { type FleetDialog, FleetDialogs, fleetPath, JoinCommand } from "./dialogs"
import "@/pages/workers/workers.css"
import "./fleets.css"

export default function FleetsPage() {
  const fleets = useFleets()
  const workers = useWorkers().data?.workers
  const matrix = useMatrix().data
  const waiting = useWaiting()
  const [dialog, setDialog] = useState<FleetDialog | null>(null)
  const list = fleets.data?.fleets
  const make = (kind: "ink" | "go") => (
    <Button kind={kind} icon="plus" onClick={() => setDialog({ kind: "new" })}>
      {words.fleets.make}
    </Button>
  )
  return (
    <Page title={words.fleets.title} className="fleets" actions={list && list.length > 0 && make("ink")}>
      <Loaded query={fleets} skeleton={<Skeleton height="240px" />}>
        {({ fleets: all }) =>
          all.length === 0 ? (
            <Empty title={words.noFleet} act={make("go")}>
              {words.noFleetText}
            </Empty>
          ) : (
            <div className="stack">
              {all.map((fleet) => {
                const mine = workers?.filter((worker) => worker.fleet === fleetName(fleet))
                return (
                  <OneFleet
                    key={fleetName(fleet)}
                    fleet={fleet}
                    online={mine && countOf(mine, "busy", "idle", "draining")}
                    pending={mine ? countOf(mine, "pending") : 0}
                    matrix={matrix}
                    waiting={waiting?.[fleetName(fleet)]}
                    onDialog={setDialog}
                  />
                )
              })}
            </div>
          )
        }
      </Loaded>
      <FleetDialogs dialog={dialog} onDialog={setDialog} fleets={list ?? []} />
    </Page>
  )
}

interface OneFleetProps {
  fleet: FleetAnswer
  /** The number of online workers, or undefined until it is known. */
  online: number | undefined
  pending: number
  matrix: Matrix | undefined
  waiting: number | undefined
  onDialog: (dialog: FleetDialog) => void
}

function OneFleet({ fleet, online, pending, matrix, waiting, onDialog }: OneFleetProps) {
  const name = fleetName(fleet)
  return (
    <section className="panel fleets-one" aria-label={name} id={name}>
      <header>
        <h2>
          {fleet.slug} <span className="faint">/ {fleet.stage}</span>
        </h2>
        {pending > 0 && <Badge need>{words.fleets.waits(pending)}</Badge>}
        <span className="row row-wrap row-end">
          <Button size="small" icon="plus" onClick={() => onDialog({ kind: "join", fleet })}>
            {words.add}
          </Button>
          <Button size="small" onClick={() => onDialog({ kind: "assign", fleet })}>
            {words.assign}
          </Button>
          <Button size="small" icon="key" onClick={() => onDialog({ kind: "secret", fleet })}>
            {words.newSecret}
          </Button>
          <Button size="small" onClick={() => onDialog({ kind: "prompts", fleet })}>
            {prompts.open}
          </Button>
          <Button size="small" icon="sliders" onClick={() => onDialog({ kind: "settings", fleet })}>
            {words.fleets.settings}
          </Button>
        </span>
      </header>
      <p className="fleets-facts">
        <Link href="/console/workers">{words.fleetFacts(online ?? 0, fleet.workers, fleet.max_workers)}</Link>
        <Link href="/console/queue">{waiting === undefined ? "…" : words.waiting(waiting)}</Link>
        <span>{words.fleets.approvals[fleet.approval] ?? fleet.approval}</span>
        <span className="faint">
          {words.fleets.made} <Time at={fleet.created_at} />
        </span>
      </p>
      <Abilities matrix={matrix} fleet={name} workflows={fleet.workflows} />
      <More fleet={fleet} />
    </section>
  )
}

/** The expandable details of a fleet. Their data is read when the user opens them. */
function More({ fleet }: { fleet: FleetAnswer }) {
  const [isOpen, setOpen] = useState(false)
  const details = useQuery<FleetDetails>(isOpen ? fleetPath(fleet) : null, { freshSeconds: 10 })
  return (
    <details className="fleets-more" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{words.fleets.details}</summary>
      {isOpen && (
        <Loaded query={details} skeleton={<Skeleton height="120px" />}>
          {(details) => (
            <div className="stack">
              <p className="quiet">
                {words.addText} {words.addNoSecret}
              </p>
              <JoinCommand text={details.join} />
              <h3>{words.fleets.switches}</h3>
              {details.model_switches.length === 0 && <p className="faint">{words.fleets.switchesNone}</p>}
              <ul className="fleets-switches">
                {details.model_switches.map((modelSwitch) => (
                  <li key={modelSwitch.model}>
                    <span className="mono">{modelSwitch.model}</span>
                    <span className="quiet">
                      {modelSwitch.is_free
                        ? words.fleets.free
                        : words.fleets.switchOf(duration(modelSwitch.seconds))}
                      , {words.fleets.runOf(duration(modelSwitch.run_seconds))}
                    </span>
                  </li>
                ))}
              </ul>
            </div>
          )}
        </Loaded>
      )}
    </details>
  )
}
