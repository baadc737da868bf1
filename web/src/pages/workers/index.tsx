/** Shows all workers: by fleet, in one list, and in a table of the workflows that each can run. */

import { useState } from "react"
import { Link, useLocation, useSearch } from "wouter"
import { type FleetDialog, FleetDialogs } from "@/pages/fleets/dialogs"
import { Button, Empty, Loaded, Page, Panel, Skeleton, Tabs } from "@/ui"
import { words } from "@/words/en/workers"
import { Abilities } from "./Abilities"
import { type Ask, useQuestions } from "./acts"
import { MatrixView } from "./MatrixView"
import { busyCount, byFleet, countOf, type FleetGroup, sortedWorkers } from "./machines"
import { useFleets, useMatrix, useWaiting, useWorkers } from "./useMachines"
import { WorkerRows } from "./WorkerRows"
import "./workers.css"

const VIEWS = [
  { key: "fleets", title: words.byFleet },
  { key: "all", title: words.all },
  { key: "matrix", title: words.matrix },
] as const
type View = (typeof VIEWS)[number]["key"]

export default function WorkersPage() {
  const search = useSearch()
  const [, go] = useLocation()
  const view = VIEWS.find((item) => item.key === new URLSearchParams(search).get("view"))?.key ?? "fleets"
  const workers = useWorkers()
  const fleets = useFleets()
  const matrix = useMatrix()
  const waiting = useWaiting()
  const questions = useQuestions()
  const [dialog, setDialog] = useState<FleetDialog | null>(null)
  const all = workers.data?.workers
  const list = fleets.data?.fleets
  const show = (next: View) =>
    go(next === "fleets" ? "/console/workers" : `/console/workers?view=${next}`, { replace: true })
  return (
    <Page
      title={words.title}
      className="workers"
      aside={
        <span className="faint workers-summary">
          {all && list && words.summary(all.length, list.length, busyCount(all))}
        </span>
      }
      actions={
        <>
          <Tabs label={words.views} tabs={VIEWS} value={view} onChange={show} />
          <Button
            kind="ink"
            icon="plus"
            onClick={() => setDialog(list?.length === 0 ? { kind: "new" } : { kind: "join", fleet: null })}
          >
            {words.add}
          </Button>
        </>
      }
    >
      {view === "matrix" ? (
        <Loaded query={matrix} skeleton={<Skeleton height="320px" />}>
          {(matrix) => <MatrixView matrix={matrix} />}
        </Loaded>
      ) : (
        <Loaded query={workers} skeleton={<Coming />}>
          {({ workers: all }) => (
            <Loaded query={fleets} skeleton={<Coming />}>
              {({ fleets: groups }) =>
                groups.length === 0 ? (
                  <NoFleet onMake={() => setDialog({ kind: "new" })} />
                ) : view === "all" && all.length > 0 ? (
                  <Panel>
                    <WorkerRows
                      label={words.all}
                      workers={sortedWorkers(all)}
                      ask={questions.ask}
                      withFleet
                    />
                  </Panel>
                ) : (
                  byFleet(all, groups).map((group) => (
                    <OneFleet
                      key={group.name}
                      group={group}
                      ask={questions.ask}
                      matrix={matrix.data}
                      waiting={waiting?.[group.name]}
                      onDialog={setDialog}
                    />
                  ))
                )
              }
            </Loaded>
          )}
        </Loaded>
      )}
      {questions.dialogs}
      <FleetDialogs dialog={dialog} onDialog={setDialog} fleets={list ?? []} />
    </Page>
  )
}

function Coming() {
  return (
    <div className="stack">
      <Skeleton height="220px" />
      <Skeleton height="220px" />
    </div>
  )
}

function NoFleet({ onMake }: { onMake: () => void }) {
  return (
    <Empty
      title={words.noFleet}
      act={
        <Button kind="go" onClick={onMake}>
          {words.fleets.make}
        </Button>
      }
    >
      {words.noFleetText}
    </Empty>
  )
}

interface OneFleetProps {
  group: FleetGroup
  ask: Ask
  matrix: ReturnType<typeof useMatrix>["data"]
  waiting: number | undefined
  onDialog: (dialog: FleetDialog) => void
}

function OneFleet({ group: { name, fleet, workers }, ask, matrix, waiting, onDialog }: OneFleetProps) {
  const [slug, stage] = name.split("/")
  const online = countOf(workers, "busy", "idle", "draining")
  return (
    <section className="panel workers-fleet" aria-label={name}>
      <header>
        <h2>
          <Link href={`/console/fleets#${name}`}>{slug}</Link> <span className="faint">/ {stage}</span>
        </h2>
        <span className="faint">
          {words.fleetFacts(online, workers.length, fleet?.max_workers ?? null)}
          {waiting !== undefined && `, ${words.waiting(waiting)}`}
        </span>
        {fleet && (
          <span className="row row-end">
            <Button size="small" onClick={() => onDialog({ kind: "assign", fleet })}>
              {words.assign}
            </Button>
            <Button size="small" icon="key" onClick={() => onDialog({ kind: "secret", fleet })}>
              {words.newSecret}
            </Button>
          </span>
        )}
      </header>
      {fleet && <Abilities matrix={matrix} fleet={name} workflows={fleet.workflows} />}
      {workers.length > 0 ? (
        <WorkerRows label={name} workers={workers} ask={ask} />
      ) : (
        <div className="workers-none">
          <span className="quiet">{words.noneInFleet}</span>
          {fleet && (
            <Button size="small" kind="ink" icon="plus" onClick={() => onDialog({ kind: "join", fleet })}>
              {words.add}
            </Button>
          )}
        </div>
      )}
    </section>
  )
}
