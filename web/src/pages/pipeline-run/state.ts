/** Maps a run's status and reason to the state that pages show, and to a short explanation. */

import type { PipelineRunSummary } from "@/api/schema"
import type { State } from "@/ui"
import { words } from "@/words/en/pipelines"

const STATES: Record<string, State> = {
  complete: "succeeded",
  waiting_for_judgement: "waiting",
  failed: "failed",
  candidates_limit: "waiting",
  tokens_limit: "waiting",
  time_up: "cancelled",
}

export function reasonOf(run: Pick<PipelineRunSummary, "status" | "reason">): { state: State; word: string } {
  if (run.status !== "active") return { state: "cancelled", word: words.reasons[run.status] ?? run.status }
  const { reason } = run
  if (reason === null) return { state: "running", word: words.making }
  return { state: STATES[reason] ?? "running", word: words.reasons[reason] ?? words.making }
}
