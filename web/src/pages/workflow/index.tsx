/** The workflow page, with the workflow's drawing, properties, effects, versions and workers, a
 * test run, and a form that creates an effect from it. */

import { type ReactNode, useEffect, useMemo, useState } from "react"
import { Link, useLocation, useSearch } from "wouter"
import { api, cache, useAct, useQuery } from "@/api"
import type {
  AbleWorkers,
  AdminEffectAnswer,
  AdminEffects,
  Drawing as Drawn,
  PropertyAnswer,
  WorkflowDetail,
} from "@/api/schema"
import { notifyFailed } from "@/pages/jobs/BulkBar"
import { Drawing } from "@/pages/workflows/Drawing"
import { Drop, type Opened, useOpen } from "@/pages/workflows/Drop"
import { inputAt, labelOf } from "@/pages/workflows/draft"
import { Editor, Unfinished } from "@/pages/workflows/Editor"
import { valueText } from "@/pages/workflows/layout"
import { WorkflowState } from "@/pages/workflows/WorkflowState"
import {
  Button,
  Confirm,
  Crumb,
  Dialog,
  duration,
  Empty,
  ErrorNote,
  Icon,
  LinkButton,
  Loaded,
  Menu,
  Page,
  Panel,
  Skeleton,
  Status,
  Tabs,
  toast,
  tokens,
} from "@/ui"
import { words } from "@/words/en/workflows"
import { MakeEffect } from "./MakeEffect"
import { Terms } from "./Terms"
import { TestPart } from "./TestRun"
import { Versions } from "./Versions"
import "@/pages/workflows/workflows.css"
import "./workflow.css"

export default function WorkflowPage({ name }: { name: string }) {
  const path = `/api/admin/workflows/${encodeURIComponent(name)}`
  const query = useQuery<WorkflowDetail>(path)
  const [opened, setOpened] = useState<Opened | null>(null)
  useAssigned(query.data, query.reload)
  if (opened && query.data)
    return (
      <Editor
        key={opened.name}
        opened={opened}
        base={{
          slug: name,
          properties: query.data.properties,
          outputNode: query.data.output_node_id,
        }}
        onDiscard={() => setOpened(null)}
        onRegistered={() => setOpened(null)}
      />
    )
  if (query.error?.status === 404)
    return (
      <Page title={words.notFound}>
        <Empty title={words.notFound} act={<LinkButton href="/console/workflows">{words.all}</LinkButton>} />
      </Page>
    )
  return (
    <Page
      className="workflow"
      title={words.oneTitle(name)}
      head={name}
      aside={query.data && <WorkflowState workflow={query.data} pill />}
      actions={query.data && <Acts workflow={query.data} path={path} onOpened={setOpened} />}
    >
      <Crumb href="/console/workflows" list={words.title}>
        <span className="mono">{name}</span>
      </Crumb>
      <Loaded query={query} skeleton={<Skeleton height="480px" />}>
        {(workflow) => <Whole workflow={workflow} path={path} onOpened={setOpened} />}
      </Loaded>
    </Page>
  )
}

const AGAIN_MS = 3_000

/** A fleet may accept a new workflow automatically, so the page reloads the workflow until a fleet
 * has it. */
function useAssigned(workflow: WorkflowDetail | undefined, reload: () => void): void {
  useEffect(() => {
    if (!workflow || workflow.fleets.length > 0) return undefined
    const timer = setTimeout(reload, AGAIN_MS)
    return () => clearTimeout(timer)
  }, [workflow, reload])
}

interface WholeProps {
  workflow: WorkflowDetail
  path: string
  onOpened: (opened: Opened) => void
}

const PARTS = ["drawing", "test", "versions", "workers"] as const
type Part = (typeof PARTS)[number]

function Whole({ workflow, path, onOpened }: WholeProps) {
  const [here, go] = useLocation()
  const requested = new URLSearchParams(useSearch()).get("part")
  const part = PARTS.find((item) => item === requested) ?? "drawing"
  const tabs = PARTS.map((key) => ({
    key,
    title: words.part[key],
    count: key === "versions" ? workflow.versions.length : undefined,
  }))
  const show = (key: Part) => go(key === "drawing" ? here : `${here}?part=${key}`, { replace: true })
  return (
    <>
      <Unfinished of={workflow.slug} onOpened={onOpened} />
      <RegistrationNotes />
      <Facts workflow={workflow} />
      {workflow.fleets.length === 0 && (
        <p className="workflow-note">
          {words.noFleetText} <Link href="/console/fleets">{words.seeFleets}</Link>
        </p>
      )}
      <Tabs label={words.parts} tabs={tabs} value={part} onChange={show}>
        {part === "drawing" && <DrawingPart workflow={workflow} path={path} />}
        {part === "test" && <TestPart workflow={workflow} path={path} />}
        {part === "versions" && <Versions workflow={workflow} path={path} onOpened={onOpened} />}
        {part === "workers" && <Workers path={path} />}
      </Tabs>
    </>
  )
}

/** Shows the control plane's notes from the registration of this version. */
function RegistrationNotes() {
  const [lines, setLines] = useState<readonly string[]>(() => {
    const warnings = (window.history.state as { warnings?: unknown } | null)?.warnings
    return Array.isArray(warnings) ? warnings.map(String) : []
  })
  if (lines.length === 0) return null
  return (
    <div className="note workflow-told" role="status">
      <Icon name="warning" />
      <div className="note-text">
        {lines.map((line) => (
          <span key={line}>{line}</span>
        ))}
      </div>
      <Button kind="ghost" size="small" onClick={() => setLines([])}>
        {words.seen}
      </Button>
    </div>
  )
}

function Facts({ workflow }: { workflow: WorkflowDetail }) {
  const models = workflow.models.map((model) => model.file)
  const facts: readonly (readonly [string, ReactNode])[] = [
    [words.facts.version, workflow.version],
    [words.facts.kind, words.kinds[workflow.kind] ?? workflow.kind],
    [words.facts.fleets, workflow.fleets.join(", ") || words.noFleet],
    [words.facts.limit, duration(workflow.run_limit_seconds)],
    [words.facts.price, workflow.price_tokens === null ? words.notOffered : tokens(workflow.price_tokens)],
    [words.facts.capabilities, workflow.required_capabilities.join(", ")],
    [words.facts.models, models.join(", ")],
  ]
  return (
    <dl className="workflow-facts">
      {facts
        .filter(([, value]) => value !== "")
        .map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
    </dl>
  )
}

function DrawingPart({ workflow, path }: { workflow: WorkflowDetail; path: string }) {
  const drawing = useQuery<Drawn>(`${path}/drawing`, { query: { version: workflow.version } })
  const inputs = useMemo(
    () =>
      workflow.properties.flatMap(({ binding, default: value }) =>
        binding ? [inputAt(binding, value ?? "")] : [],
      ),
    [workflow.properties],
  )
  const bindings = useMemo(() => new Set(inputs.map((property) => property.binding)), [inputs])
  return (
    <div className="workflow-parts">
      <div className="workflow-drawing">
        <Loaded query={drawing} skeleton={<Skeleton height="480px" />}>
          {(drawn) => <Drawing drawing={drawn} properties={inputs} exposed={bindings} />}
        </Loaded>
      </div>
      <div className="stack">
        <Panel title={words.exposed} aside={<span className="badge">{workflow.properties.length}</span>}>
          <Properties properties={workflow.properties} />
        </Panel>
        <Effects slug={workflow.slug} />
      </div>
    </div>
  )
}

function Properties({ properties }: { properties: readonly PropertyAnswer[] }) {
  if (properties.length === 0) return <p className="workflow-none">{words.nothingExposed}</p>
  return (
    <ul className="workflow-list">
      {properties.map((property) => (
        <li key={property.name}>
          <span>
            <strong>{labelOf(property)}</strong> <span className="faint">{words.types[property.type]}</span>
          </span>
          <span className="mono faint">{rangeOf(property)}</span>
        </li>
      ))}
    </ul>
  )
}

/** Returns a text such as "256 (16 to 1024)". */
function rangeOf({ default: value, minimum, maximum }: PropertyAnswer): string {
  const range = minimum !== null && maximum !== null ? words.range(minimum, maximum) : ""
  return [value === null ? "" : valueText(value).slice(0, 40), range].filter(Boolean).join(" ")
}

function Effects({ slug }: { slug: string }) {
  const query = useQuery<AdminEffects>("/api/admin/effects", { query: { workflow: slug } })
  return (
    <Panel title={words.effects}>
      <Loaded query={query} skeleton={<Skeleton height="40px" />}>
        {({ effects }) =>
          effects.length === 0 ? (
            <p className="workflow-none">{words.noEffect}</p>
          ) : (
            <ul className="workflow-list">
              {effects.map((effect) => (
                <OneEffect key={effect.id} effect={effect} />
              ))}
            </ul>
          )
        }
      </Loaded>
    </Panel>
  )
}

function OneEffect({ effect }: { effect: AdminEffectAnswer }) {
  return (
    <li>
      <Link href={`/console/effects/${effect.slug}`}>{effect.title}</Link>
      <span className="row">
        <span className="mono faint">{tokens(effect.price_tokens)}</span>
        <Status status={effect.published ? "succeeded" : "cancelled"}>
          {effect.published ? words.published : words.unpublished}
        </Status>
      </span>
    </li>
  )
}

function Workers({ path }: { path: string }) {
  const query = useQuery<AbleWorkers>(`${path}/workers`)
  return (
    <Panel>
      <Loaded query={query} skeleton={<Skeleton height="120px" />}>
        {({ workers }) =>
          workers.length === 0 ? (
            <p className="workflow-none">{words.workersNone}</p>
          ) : (
            <ul className="workflow-list">
              {workers.map((worker) => (
                <li key={`${worker.fleet} ${worker.worker_id}`}>
                  <span>
                    <Link href={`/console/workers/${encodeURIComponent(worker.worker_id)}`}>
                      {worker.worker_id}
                    </Link>{" "}
                    <span className="faint">{worker.fleet}</span>
                  </span>
                  <span className="row row-wrap">
                    {!worker.can_run && (
                      <span className="faint">
                        {words.lacks(Object.values(worker.missing).flat().join(", "))}
                      </span>
                    )}
                    <Status status={worker.can_run ? "succeeded" : "failed"}>
                      {worker.can_run ? words.canRun : words.cannotRun}
                    </Status>
                  </span>
                </li>
              ))}
            </ul>
          )
        }
      </Loaded>
    </Panel>
  )
}

type Change = keyof typeof words.changed
const UNDO: Record<Change, Change> = {
  pause: "resume",
  resume: "pause",
  activate: "deactivate",
  deactivate: "activate",
}

async function change(path: string, slug: string, act: Change): Promise<void> {
  await api.post(`${path}/${act}`)
  cache.invalidate("/api/admin/workflows")
  toast({
    title: words.changed[act](slug),
    text: act === "pause" ? words.pausedText : undefined,
    state: act === "pause" || act === "deactivate" ? "cancelled" : "succeeded",
    act: { label: words.undo, run: () => void change(path, slug, UNDO[act]).catch(notifyFailed) },
  })
}

function Acts({ workflow, path, onOpened }: WholeProps) {
  const [here, go] = useLocation()
  const [dialog, setDialog] = useState<"off" | "file" | "effect" | "terms" | null>(null)
  const reopen = useOpen(onOpened)
  const edit = useAct(async () => {
    const document = await api.get<unknown>(`${path}/document`)
    await reopen.act.run(new Blob([JSON.stringify(document)]), workflow.slug)
  })
  const act = (one: Change) => void change(path, workflow.slug, one).catch(notifyFailed)
  const error = edit.error ?? reopen.act.error
  return (
    <>
      <Button icon="play" onClick={() => go(`${here}?part=test`, { replace: true })}>
        {words.testRun}
      </Button>
      <Menu
        label={words.versionMenu}
        kind="plain"
        items={[
          { key: "edit", label: words.edit, icon: "edit", run: () => void edit.run() },
          { key: "file", label: words.fromNewFile, icon: "upload", run: () => setDialog("file") },
        ]}
      >
        {words.versionMenu}
        <Icon name="down" size={12} />
      </Menu>
      <Button kind="ink" onClick={() => setDialog("effect")}>
        {words.makeEffect}
      </Button>
      <Menu
        label={words.acts}
        items={[
          { key: "terms", label: words.terms, icon: "sliders", run: () => setDialog("terms") },
          workflow.is_paused
            ? { key: "resume", label: words.resume, icon: "play", run: () => act("resume") }
            : { key: "pause", label: words.pause, icon: "pause", run: () => act("pause") },
          workflow.is_active
            ? { key: "off", label: words.switchOff, icon: "stop", danger: true, run: () => setDialog("off") }
            : { key: "on", label: words.switchOn, icon: "tick", run: () => act("activate") },
        ]}
      />
      {error && <ErrorNote error={error} />}
      <Confirm
        open={dialog === "off"}
        onClose={() => setDialog(null)}
        title={words.askOff(workflow.slug)}
        act={words.actOff}
        onConfirm={() => change(path, workflow.slug, "deactivate")}
      >
        {words.askOffText}
      </Confirm>
      <Dialog
        open={dialog === "file"}
        onClose={() => setDialog(null)}
        title={words.newVersion(workflow.slug)}
      >
        <Drop
          onOpened={(opened) => {
            setDialog(null)
            onOpened(opened)
          }}
        />
      </Dialog>
      {dialog === "terms" && <Terms workflow={workflow} path={path} onClose={() => setDialog(null)} />}
      {dialog === "effect" && <MakeEffect workflow={workflow.slug} onClose={() => setDialog(null)} />}
    </>
  )
}
