import { Empty, Page } from "@/ui"
import { words } from "@/words/en/common"

/** In the place of a page that is not there yet. */
export function Soon() {
  return (
    <Page title={words.soon.title}>
      <Empty title={words.soon.title}>{words.soon.text}</Empty>
    </Page>
  )
}
