/** Lists a workflow's versions, shows which one new jobs use, and compares two. */

import { useMemo, useState } from "react"
import { api, cache, useAct, useQuery } from "@/api"
import type { Drawing as Drawn, WorkflowDetail, WorkflowDiff } from "@/api/schema"
import { notifyFailed } from "@/pages/jobs/BulkBar"
import { type Change, Drawing } from "@/pages/workflows/Drawing"
import { Drop, type Opened } from "@/pages/workflows/Drop"
import { inputAt } from "@/pages/workflows/draft"
import { valueText } from "@/pages/workflows/layout"
import { Button, Empty, ErrorNote, Loaded, Panel, Select, Skeleton, Status, toast } from "@/ui"
import { words } from "@/words/en/workflows"
import { changesOf, isSame, linesOf } from "./diff"

interface VersionsProps {
  workflow: WorkflowDetail
  path: string
  onOpened: (opened: Opened) => void
}

export function Versions({ workflow, path, onOpened }: VersionsProps) {
  const options = optionsOf(workflow)
  const numbers = options.map((option) => Number(option.value))
  const newest = numbers[0] ?? workflow.version
  const [to, setTo] = useState(newest)
  const [from, setFrom] = useState(numbers[1] ?? newest)
  if (numbers.length < 2)
    return (
      <div className="stack">
        <Empty title={words.oneVersion}>{words.oneVersionText}</Empty>
        <Drop onOpened={onOpened} kind="plain" />
      </div>
    )
  return (
    <div className="stack">
      <div className="workflow-choose">
        <Select
          label={words.from}
          options={options}
          value={String(from)}
          onChange={(it) => setFrom(Number(it))}
        />
        <Select label={words.to} options={options} value={String(to)} onChange={(it) => setTo(Number(it))} />
        <Use key={to} workflow={workflow} path={path} version={to} />
      </div>
      <Compared path={path} from={from} to={to} />
    </div>
  )
}

const date = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" })

/** Returns the versions as options, newest first. */
export function optionsOf(workflow: WorkflowDetail): { value: string; label: string }[] {
  const numbers = [...workflow.versions].sort((a, b) => b - a)
  return numbers.map((number) => ({ value: String(number), label: labelOf(workflow, number) }))
}

function labelOf({ version, registered_at }: WorkflowDetail, number: number): string {
  const at = registered_at[number]
  const label = at ? words.versionAt(number, date.format(new Date(at))) : words.version(number)
  return number === version ? `${label}, ${words.current}` : label
}

/** A button that makes new jobs use a version. */
export function Use({
  workflow,
  path,
  version,
}: {
  workflow: WorkflowDetail
  path: string
  version: number
}) {
  const use = useAct(async (isForced: boolean) => {
    const before = workflow.version
    await choose(path, version, isForced)
    toast({
      title: words.used(version),
      act: { label: words.undo, run: () => void choose(path, before, true).catch(notifyFailed) },
    })
  })
  if (version === workflow.version) return <Status status="succeeded">{words.current}</Status>
  const isBreaking = use.error?.status === 409 && Array.isArray(use.error.details.effects)
  return (
    <>
      <Button busy={use.isRunning} onClick={() => void use.run(false)}>
        {words.use(version)}
      </Button>
      {use.error && (
        <ErrorNote error={use.error}>
          {isBreaking && (
            <Button size="small" onClick={() => void use.run(true)}>
              {words.useAnyway}
            </Button>
          )}
        </ErrorNote>
      )}
    </>
  )
}

async function choose(path: string, version: number, isForced: boolean): Promise<void> {
  await api.post(`${path}/activate`, { version, break_effects: isForced })
  cache.invalidate("/api/admin/workflows")
}

function Compared({ path, from, to }: { path: string; from: number; to: number }) {
  const diff = useQuery<WorkflowDiff>(`${path}/diff`, { query: { before: from, after: to } })
  const drawing = useQuery<Drawn>(`${path}/drawing`, { query: { version: to } })
  const changes = useMemo(() => (diff.data ? changesOf(diff.data) : new Map<string, Change>()), [diff.data])
  const inputs = useMemo(
    () => diff.data?.values_changed.map((change) => inputAt(change.address, change.after)) ?? [],
    [diff.data],
  )
  return (
    <div className="workflow-parts">
      <div className="workflow-drawing">
        <Loaded query={drawing} skeleton={<Skeleton height="480px" />}>
          {(drawn) => (
            <Drawing drawing={drawn} properties={inputs} changes={changes} focus={[...changes.keys()][0]} />
          )}
        </Loaded>
      </div>
      <Panel title={words.compared(from, to)}>
        <Loaded query={diff} skeleton={<Skeleton height="320px" />}>
          {(diff) =>
            isSame(diff) ? <p className="workflow-none">{words.same}</p> : <Differences diff={diff} />
          }
        </Loaded>
      </Panel>
    </div>
  )
}

function Differences({ diff }: { diff: WorkflowDiff }) {
  return (
    <div className="workflow-diff">
      {diff.values_changed.length > 0 && (
        <section>
          <h3>{words.diff.values}</h3>
          <ul>
            {diff.values_changed.map((change) => (
              <li key={change.address}>
                <span>
                  {change.title} <span className="mono faint">{change.address}</span>
                </span>
                <del className="mono">{valueText(change.before)}</del>
                <ins className="mono">{valueText(change.after)}</ins>
              </li>
            ))}
          </ul>
        </section>
      )}
      {linesOf(diff).map(({ title, sign, names }) => (
        <section key={title}>
          <h3>{title}</h3>
          <ul>
            {names.map((name) => (
              <li key={name} className={sign === "+" ? "is-added" : sign === "−" ? "is-removed" : undefined}>
                {sign && <b aria-hidden="true">{sign}</b>} {name}
              </li>
            ))}
          </ul>
        </section>
      ))}
    </div>
  )
}
