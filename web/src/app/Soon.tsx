import { Empty, Page } from "@/ui"
import { words } from "@/words/en/common"

/** Shown in place of a page that hasn't been built yet. */
export function Soon() {
  return (
    <Page title={words.soon.title}>
      <Empty title={words.soon.title}>{words.soon.text}</Empty>
    </Page>
  )
}
