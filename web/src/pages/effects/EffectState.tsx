import { Status } from "@/ui"
import { words } from "@/words/en/effects"

export function EffectState({ isPublished, pill }: { isPublished: boolean; pill?: boolean }) {
  return (
    <Status status={isPublished ? "succeeded" : "cancelled"} pill={pill}>
      {isPublished ? words.published : words.unpublished}
    </Status>
  )
}
