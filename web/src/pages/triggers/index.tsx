/** Lists the triggers, which start runs on a schedule or when a webhook arrives, with their latest
 * firings. */

import { useMemo, useState } from "react"
import { Link } from "wouter"
import { api, cache, pathOf, useAct, usePages, useQuery } from "@/api"
import type {
  FiringAnswer,
  GraphPage,
  MadeTrigger,
  PipelinePage,
  TriggerAnswer,
  Triggers,
} from "@/api/schema"
import {
  Badge,
  Button,
  Code,
  Confirm,
  count,
  Dialog,
  Empty,
  ErrorNote,
  Loaded,
  Page,
  Progress,
  Skeleton,
  Status,
  TextArea,
  Time,
  toast,
} from "@/ui"
import { ShownOnce } from "@/ui/ShownOnce"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/triggers"
import { inWords, momentIn } from "./cron"
import { FiringLog } from "./FiringLog"
import { NewTrigger } from "./NewTrigger"
import "./triggers.css"

const PATH = "/api/triggers"
/** The maximum number of triggers per user. */
const PAGE = 100
const LIST = pathOf(PATH, { limit: PAGE })

function without(list: Triggers, id: string): Triggers {
  return { ...list, triggers: list.triggers.filter((trigger) => trigger.id !== id) }
}

/** The graphs and pipelines that a trigger may run, by id. */
export interface Targets {
  readonly graphs: GraphPage["graphs"]
  readonly pipelines: PipelinePage["pipelines"]
}

export default function TriggersPage() {
  const pages = usePages<TriggerAnswer, Triggers>(PATH, { limit: PAGE }, (answer) => answer.triggers)
  const targets = useTargets()
  const [isNew, setNew] = useState(false)
  const [newTrigger, setNewTrigger] = useState<MadeTrigger | null>(null)
  const isNone = pages.rows?.length === 0
  const makeOne = (
    <Button kind="ink" icon="plus" onClick={() => setNew(true)}>
      {words.make}
    </Button>
  )
  return (
    <Page title={words.title} className="triggers" actions={!isNone && makeOne}>
      <p className="quiet triggers-lead">{words.lead}</p>
      <Loaded query={pages.first} skeleton={<Skeleton height="220px" />}>
        {() =>
          isNone ? (
            <Empty
              title={words.none}
              act={
                <Button kind="go" onClick={() => setNew(true)}>
                  {words.make}
                </Button>
              }
            >
              {words.noneText}
            </Empty>
          ) : (
            <div className="stack">
              {pages.rows?.map((row) => (
                <OneTrigger key={row.id} trigger={row} targets={targets} onSecret={setNewTrigger} />
              ))}
            </div>
          )
        }
      </Loaded>
      {pages.more.error && <ErrorNote error={pages.more.error} />}
      {pages.hasMore && (
        <Button busy={pages.more.isRunning} onClick={() => void pages.more.run()}>
          {words.older}
        </Button>
      )}
      {isNew && (
        <NewTrigger
          targets={targets}
          onClose={() => setNew(false)}
          onMade={(trigger) => {
            setNew(false)
            cache.invalidate(PATH)
            if (trigger.secret) setNewTrigger(trigger)
          }}
        />
      )}
      {newTrigger?.secret && (
        <NewSecret trigger={newTrigger} secret={newTrigger.secret} onDone={() => setNewTrigger(null)} />
      )}
    </Page>
  )
}

const TARGETS_MAX = 100

function useTargets(): Targets {
  const query = { limit: TARGETS_MAX }
  const graphs = useQuery<GraphPage>("/api/graphs", { query, freshSeconds: 30 }).data
  const pipelines = useQuery<PipelinePage>("/api/pipelines", { query, freshSeconds: 30 }).data
  return useMemo(
    () => ({ graphs: graphs?.graphs ?? [], pipelines: pipelines?.pipelines ?? [] }),
    [graphs, pipelines],
  )
}

/** Shows the secret, which can't be shown again later, and explains how to use it. */
function NewSecret({
  trigger,
  secret,
  onDone,
}: {
  trigger: MadeTrigger
  secret: string
  onDone: () => void
}) {
  const address = `${location.origin}${trigger.path}`
  const curl = `curl -X POST "${address}" \\\n  -H "Authorization: Bearer ${secret}" \\\n  -d '${exampleOf(trigger)}'`
  return (
    <ShownOnce
      label={words.once.label}
      secret={secret}
      title={words.once.title}
      text={words.once.text}
      onDone={onDone}
    >
      <p className="quiet">{words.once.address}</p>
      <Code label={words.once.address} text={address} />
      <p className="quiet">{words.once.curl}</p>
      <Code label={words.once.curl} text={curl} />
    </ShownOnce>
  )
}

/** Builds an example of a webhook's body from the paths in its inputs. */
function exampleOf({ inputs }: TriggerAnswer): string {
  const body: Record<string, unknown> = {}
  for (const path of Object.values(inputs)) {
    const parts = typeof path === "string" && /^body\./.test(path) ? path.replace(/\?$/, "").split(".") : []
    let place = body
    for (const [at, part] of parts.slice(1).entries()) {
      if (at === parts.length - 2) place[part] = "…"
      else {
        place[part] ??= {}
        place = place[part] as Record<string, unknown>
      }
    }
  }
  return JSON.stringify(body)
}

interface OneTriggerProps {
  trigger: TriggerAnswer
  targets: Targets
  onSecret: (trigger: MadeTrigger) => void
}

function OneTrigger({ trigger, targets, onSecret }: OneTriggerProps) {
  const path = `${PATH}/${trigger.id}`
  const [dialog, setDialog] = useState<"remove" | "secret" | "fire" | null>(null)
  const isWebhook = trigger.kind === "webhook"
  const change = useAct(async (what: "pause" | "resume") => {
    await api.post(`${path}/${what}`)
    cache.invalidate(PATH)
  })
  const fire = useAct(async (body: unknown) => {
    const fired = await api.post<FiringAnswer>(
      `${path}/fire`,
      { body },
      { idempotencyKey: crypto.randomUUID() },
    )
    const isRefused = fired.status === "refused"
    toast(
      isRefused
        ? { title: words.refused(fired.error ?? ""), state: "failed" }
        : { title: words.started, state: "queued" },
    )
    cache.invalidate(PATH)
    cache.invalidate("/api/wallet")
    setDialog(null)
  })
  const error = change.error ?? (dialog === "fire" ? null : fire.error)
  const state = trigger.is_paused ? "paused" : trigger.is_spent ? "queued" : "online"
  const stateWords = trigger.is_paused ? words.paused : trigger.is_spent ? words.spent : words.active
  return (
    <section className="panel" aria-label={trigger.name}>
      <header className="triggers-head">
        <h2>{trigger.name}</h2>
        <Badge>{words.kinds[trigger.kind] ?? trigger.kind}</Badge>
        <Status status={state}>{stateWords}</Status>
        <span className="row row-wrap row-end">
          <Button
            size="small"
            icon="bolt"
            busy={fire.isRunning}
            onClick={() => (isWebhook ? setDialog("fire") : void fire.run(null))}
          >
            {words.fire}
          </Button>
          <Button
            size="small"
            kind="ghost"
            icon={trigger.is_paused ? "play" : "pause"}
            busy={change.isRunning}
            onClick={() => void change.run(trigger.is_paused ? "resume" : "pause")}
          >
            {trigger.is_paused ? words.resume : words.pause}
          </Button>
          {isWebhook && (
            <Button size="small" kind="ghost" onClick={() => setDialog("secret")}>
              {words.secret}
            </Button>
          )}
          <Button size="small" kind="ghost" className="is-danger" onClick={() => setDialog("remove")}>
            {words.remove}
          </Button>
        </span>
      </header>
      <div className="triggers-body">
        {error && <ErrorNote error={error} />}
        <Facts trigger={trigger} targets={targets} />
        <FiringLog trigger={trigger} pipelines={targets.pipelines} />
      </div>
      {dialog === "fire" && (
        <FireDialog
          name={trigger.name}
          body={exampleOf(trigger)}
          isRunning={fire.isRunning}
          onClose={() => setDialog(null)}
          onFire={(body) => void fire.run(body)}
        >
          {fire.error && <ErrorNote error={fire.error} />}
        </FireDialog>
      )}
      <Confirm
        open={dialog === "secret"}
        onClose={() => setDialog(null)}
        title={words.secretTitle}
        act={words.secretAct}
        onConfirm={async () => onSecret(await api.post<MadeTrigger>(`${path}/secret`))}
      >
        <p>{words.secretText}</p>
      </Confirm>
      <Confirm
        open={dialog === "remove"}
        onClose={() => setDialog(null)}
        title={words.removeTitle(trigger.name)}
        act={words.removeAct}
        onConfirm={async () => {
          await api.delete(path)
          toast({ title: words.removed(trigger.name) })
          // The trigger's firings were deleted with it, so they must not be read again.
          cache.set<Triggers>(LIST, (before) => before && without(before, trigger.id))
        }}
      >
        <p>{words.removeText}</p>
      </Confirm>
    </section>
  )
}

function Facts({ trigger, targets }: Pick<OneTriggerProps, "trigger" | "targets">) {
  const { cron, timezone, next_at, path, missed, used_tokens, tokens_per_day, max_tokens } = trigger
  return (
    <div className="triggers-facts">
      <div>
        {cron ? (
          <>
            <p className="triggers-told">{inWords(cron)}</p>
            <p className="faint mono">{words.zone(cron, timezone)}</p>
            {next_at && (
              <p className="faint">
                {words.next}: {momentIn(next_at, timezone)}, <Time at={next_at} />
              </p>
            )}
            {missed > 0 && <p className="faint">{words.missed(missed)}</p>}
          </>
        ) : (
          <p className="mono">{`${location.origin}${path}`}</p>
        )}
      </div>
      <div>
        <Target trigger={trigger} targets={targets} />
        {Object.entries(trigger.inputs).map(([name, value]) => (
          <p key={name} className="faint mono">
            {name}: {typeof value === "string" ? value : JSON.stringify(value)}
          </p>
        ))}
      </div>
      <div>
        <Progress
          label={words.tokensToday}
          value={tokens_per_day > 0 ? used_tokens / tokens_per_day : 1}
          state={trigger.is_spent ? "failed" : "ink"}
        />
        <p className="faint">{words.ofTokens(count(used_tokens), count(tokens_per_day))}</p>
        {max_tokens !== null && <p className="faint">{words.perRun(count(max_tokens))}</p>}
      </div>
    </div>
  )
}

function Target({ trigger, targets }: Pick<OneTriggerProps, "trigger" | "targets">) {
  const graph = targets.graphs.find((graph) => graph.id === trigger.graph_id)
  const pipeline = targets.pipelines.find((pipeline) => pipeline.id === trigger.pipeline_id)
  if (graph) return <Link href={`/graphs/${graph.id}`}>{words.runs(graph.name, trigger.version)}</Link>
  if (pipeline) return <Link href={`/pipelines/${pipeline.id}`}>{words.runsPipeline(pipeline.name)}</Link>
  return <p>{words.runsPipeline(words.gone)}</p>
}

interface FireDialogProps {
  name: string
  body: string
  isRunning: boolean
  onClose: () => void
  onFire: (body: unknown) => void
  children: React.ReactNode
}

/** Fires a webhook with a body that the user can edit. */
function FireDialog({ name, body, isRunning, onClose, onFire, children }: FireDialogProps) {
  const [text, setText] = useState(body)
  const [isWrong, setWrong] = useState(false)
  return (
    <Dialog
      open
      onClose={onClose}
      title={words.fireTitle(name)}
      actions={
        <>
          <Button onClick={onClose}>{common.cancel}</Button>
          <Button
            kind="go"
            busy={isRunning}
            onClick={() => {
              try {
                onFire(text.trim() === "" ? null : JSON.parse(text))
              } catch {
                setWrong(true)
              }
            }}
          >
            {words.fire}
          </Button>
        </>
      }
    >
      <p className="dialog-text">{words.fireText}</p>
      <TextArea
        label={words.fireBody}
        rows={5}
        value={text}
        spellCheck={false}
        error={isWrong && words.form.notJson}
        onChange={(event) => {
          setText(event.target.value)
          setWrong(false)
        }}
      />
      {children}
    </Dialog>
  )
}
