import type { WorkflowAnswer } from "@/api/schema"
import { Status } from "@/ui"
import { words } from "@/words/en/workflows"

export function WorkflowState({
  workflow,
  pill,
}: {
  workflow: Pick<WorkflowAnswer, "is_active" | "is_paused">
  pill?: boolean
}) {
  if (!workflow.is_active)
    return (
      <Status status="cancelled" pill={pill}>
        {words.off}
      </Status>
    )
  if (workflow.is_paused)
    return (
      <Status status="queued" pill={pill}>
        {words.paused}
      </Status>
    )
  return (
    <Status status="succeeded" pill={pill}>
      {words.on}
    </Status>
  )
}
