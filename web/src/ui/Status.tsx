/** Shows states by shape, word and color, in this order of importance. */

import type { ReactNode } from "react"
import { words } from "@/words/en/common"

export type State = "queued" | "running" | "succeeded" | "failed" | "cancelled" | "waiting"

const SHAPES: Record<State, ReactNode> = {
  queued: <circle cx="8" cy="8" r="5.6" strokeDasharray="2.3 2.1" />,
  running: (
    <>
      <circle cx="8" cy="8" r="5.6" opacity=".32" />
      <path className="spin" d="M8 2.4A5.6 5.6 0 0 1 13.6 8" strokeWidth="2.2" />
    </>
  ),
  succeeded: (
    <>
      <circle cx="8" cy="8" r="6.6" fill="currentColor" stroke="none" />
      <path className="cut" d="m5 8.2 2.1 2.1L11 6" />
    </>
  ),
  failed: (
    <>
      <path d="M8 .9 15.1 8 8 15.1.9 8z" fill="currentColor" stroke="none" />
      <path className="cut" d="m6 6 4 4M10 6l-4 4" />
    </>
  ),
  cancelled: (
    <>
      <circle cx="8" cy="8" r="5.6" />
      <path d="m4.2 11.8 7.6-7.6" />
    </>
  ),
  waiting: (
    <>
      <path className="bubble" d="M1.8 2h12.4v9.2H9L5.4 14.5v-3.3H1.8z" />
      <path className="cut" d="M6.4 5.2c.2-2 3.3-1.8 3.2.1C9.5 6.5 8 6.5 8 7.6M8 9.2v.1" strokeWidth="1.4" />
    </>
  ),
}

/** Maps the API's statuses of jobs, dispatches, graph and pipeline runs, workers and deliveries
 * to the six states. */
const STATES: Record<string, State> = {
  queued: "queued",
  pending: "queued",
  offline: "cancelled",
  processing: "running",
  leased: "running",
  running: "running",
  busy: "running",
  draining: "running",
  active: "running",
  completed: "succeeded",
  succeeded: "succeeded",
  delivered: "succeeded",
  ready: "succeeded",
  idle: "succeeded",
  online: "succeeded",
  failed: "failed",
  lost: "failed",
  revoked: "failed",
  cancelled: "cancelled",
  expired: "cancelled",
  paused: "cancelled",
  skipped: "cancelled",
  waiting: "waiting",
  asking: "waiting",
  unapproved: "waiting",
}

export function stateOf(status: string): State {
  return STATES[status] ?? "queued"
}

export function StateIcon({ state, size = 16 }: { state: State; size?: number }) {
  return (
    <svg
      className={`icon state-icon is-${state}`}
      viewBox="0 0 16 16"
      width={size}
      height={size}
      aria-hidden="true"
    >
      {SHAPES[state]}
    </svg>
  )
}

interface StatusProps {
  /** A status of the API, or one of the six states. */
  status: string
  /** Replaces the default word. */
  children?: ReactNode
  /** Adds a colored background. Only for headers and dialogs. */
  pill?: boolean
}

export function Status({ status, children, pill = false }: StatusProps) {
  const state = stateOf(status)
  return (
    <span className={`status is-${state}${pill ? " pill" : ""}`}>
      <StateIcon state={state} />
      <span>{children ?? words.states[state]}</span>
    </span>
  )
}

/** A count or a short fact next to a name. `need` means that the user must act. */
export function Badge({ children, need = false }: { children: ReactNode; need?: boolean }) {
  return <span className={need ? "badge badge-need" : "badge"}>{children}</span>
}
