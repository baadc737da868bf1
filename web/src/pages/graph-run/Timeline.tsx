/** Shows a run's waiting and running times on one time axis, and its critical path. */

import { useEffect } from "react"
import { useQuery } from "@/api"
import type { CriticalStep, GraphRunAnswer, NodeTimeline, RunTimeline } from "@/api/schema"
import { Badge, duration, Loaded, Skeleton, StateIcon, stateOf } from "@/ui"
import { words as canvasWords } from "@/words/en/canvas"
import { words } from "@/words/en/runReports"
import { type Bar, barsOf, kindsIn, waitsOf } from "./bars"
import { isOver, stampOf } from "./follow"
import "./timeline.css"

interface TimelineProps {
  run: GraphRunAnswer
  selected: string | undefined
  onSelect: (node: string) => void
}

const RELOAD_MS = 2_000

export function Timeline({ run, selected, onSelect }: TimelineProps) {
  const timeline = useQuery<RunTimeline>(`/api/graph-runs/${run.id}/timeline`)
  const { reload } = timeline
  const stamp = stampOf(run)
  const goesOn = !isOver(run.status)
  // biome-ignore lint/correctness/useExhaustiveDependencies: reads again whenever an execution has ended
  useEffect(reload, [stamp])
  useEffect(() => {
    if (!goesOn) return
    const timer = setInterval(reload, RELOAD_MS)
    return () => clearInterval(timer)
  }, [goesOn, reload])
  return (
    <section className="timeline" aria-label={words.timelineOf(run.name)}>
      <Loaded query={timeline} skeleton={<Skeleton height="60vh" />}>
        {(timeline) =>
          timeline.nodes.length === 0 ? (
            <p className="timeline-none faint">{words.none}</p>
          ) : (
            <>
              <Rows timeline={timeline} selected={selected} onSelect={onSelect} />
              <Path timeline={timeline} />
            </>
          )
        }
      </Loaded>
    </section>
  )
}

function Rows({ timeline, selected, onSelect }: { timeline: RunTimeline } & Omit<TimelineProps, "run">) {
  const length = duration(timeline.seconds)
  return (
    <div className="timeline-rows">
      <header>
        <h2>
          {words.timeline}{" "}
          <small>{isOver(timeline.status) ? words.tookAll(length) : words.soFar(length)}</small>
        </h2>
        <ul className="timeline-legend">
          {kindsIn(timeline.nodes).map((kind) => (
            <li key={kind}>
              <span className={`timeline-bar is-${kind}`} />
              {words.legend[kind]}
            </li>
          ))}
        </ul>
      </header>
      <table aria-label={words.timeline}>
        <thead>
          <tr>
            <th scope="col">{words.node}</th>
            <th scope="col" className="timeline-when">
              {words.when} <span className="mono">{words.axis(length)}</span>
            </th>
            <th scope="col">{words.waitedFor}</th>
            <th scope="col">{words.waited}</th>
            <th scope="col" className="timeline-ran">
              {words.ran}
            </th>
          </tr>
        </thead>
        <tbody>
          {timeline.nodes.map((node) => (
            <Row
              key={node.id}
              node={node}
              seconds={timeline.seconds}
              isSelected={node.id === selected}
              onSelect={onSelect}
            />
          ))}
        </tbody>
      </table>
    </div>
  )
}

interface RowProps {
  node: NodeTimeline
  seconds: number
  isSelected: boolean
  onSelect: (node: string) => void
}

function Row({ node, seconds, isSelected, onSelect }: RowProps) {
  const status = canvasWords.nodeStatuses[node.status] ?? node.status
  const state = stateOf(shownStatus(node.status))
  return (
    <tr className={node.is_critical ? "is-critical" : undefined} aria-current={isSelected || undefined}>
      <th scope="row">
        <div className="timeline-head">
          <button
            type="button"
            className="timeline-node"
            aria-label={words.nodeNamed(node.id, status)}
            onClick={() => onSelect(node.id)}
          >
            <span className={`timeline-state is-${state}`} title={status}>
              <StateIcon state={state} />
            </span>
            <span className="cut-text">{node.id}</span>
          </button>
          {node.is_critical && <Badge>{words.critical}</Badge>}
        </div>
      </th>
      <td className="timeline-when">
        <div className="timeline-axis">
          {barsOf(node, seconds).map((bar) => (
            <OneBar key={`${bar.kind} ${bar.from}`} bar={bar} status={node.status} />
          ))}
        </div>
      </td>
      <td className="cut-text" data-label={words.waitedFor}>
        {node.after}
      </td>
      <td data-label={words.waited}>{waitsText(node)}</td>
      <td className="timeline-ran" data-label={words.ran}>
        {runningText(node)}
      </td>
    </tr>
  )
}

function shownStatus(status: string): string {
  return status === "done" ? "succeeded" : status
}

function OneBar({ bar, status }: { bar: Bar; status: string }) {
  const how = bar.kind === "running" ? ` is-${stateOf(shownStatus(status))}` : ""
  return (
    <span
      className={`timeline-bar is-${bar.kind}${how}`}
      style={{ left: `${bar.from * 100}%`, width: `${(bar.to - bar.from) * 100}%` }}
      title={words.span(duration(bar.seconds), words.kinds[bar.kind] ?? bar.kind)}
    />
  )
}

function waitsText(node: NodeTimeline): string {
  return waitsOf(node.seconds, node.executions)
    .map((wait) => words.span(duration(wait.seconds), words.kinds[wait.kind] ?? wait.kind))
    .join(", ")
}

function runningText({ seconds, executions, status }: NodeTimeline): string {
  if (!seconds.running) return status === "skipped" ? (canvasWords.nodeStatuses.skipped ?? "") : ""
  const average = duration(seconds.running / Math.max(1, executions))
  return executions > 1 ? words.times(executions, average) : average
}

/** Steps that take less than this fraction of the critical path's duration aren't listed. */
const STEP_PART_MIN = 0.005

function Path({ timeline }: { timeline: RunTimeline }) {
  const all = timeline.critical_path.reduce((sum, step) => sum + step.end - step.start, 0)
  const steps = timeline.critical_path.filter((step) => step.end - step.start > all * STEP_PART_MIN)
  if (steps.length === 0) return null
  const more = timeline.critical_total - timeline.critical_path.length
  return (
    <div className="timeline-path">
      <h2>
        {words.criticalPath} <small>{duration(all)}</small>
      </h2>
      <p className="faint">{words.criticalText}</p>
      <ol>
        {steps.map((step) => (
          <li key={`${step.node} ${step.index.join(".")}`}>
            <b className="cut-text">{words.step(step.node, step.index)}</b>
            <span className="timeline-axis">
              <span
                className="timeline-bar is-step"
                style={{ width: `${((step.end - step.start) / all) * 100}%` }}
              />
            </span>
            <span className="timeline-ran">{duration(step.end - step.start)}</span>
            <span className="faint timeline-told">{stepText(step)}</span>
          </li>
        ))}
      </ol>
      {more > 0 && <p className="faint">{words.criticalMore(more)}</p>}
    </div>
  )
}

function stepText(step: CriticalStep): string {
  const parts = waitsOf(step.seconds, 1)
  const ran = step.seconds.running ? [{ kind: "running", seconds: step.seconds.running }] : []
  return [...ran, ...parts]
    .map((part) => words.span(duration(part.seconds), words.kinds[part.kind] ?? part.kind))
    .join(", ")
}
