/** Pictures and videos that show what the effect does, in pairs. */

import { useState } from "react"
import { api, cache, useAct } from "@/api"
import type { AdminEffectAnswer, Example, ExampleMedia } from "@/api/schema"
import { PickButton } from "@/pages/workflows/Drop"
import { Button, Confirm, ErrorNote, Panel } from "@/ui"
import { words } from "@/words/en/effects"

const EXAMPLES_MAX = 6
const EMPTY: Example = { before: null, after: null }
type Side = "before" | "after"

export function Examples({ effect, path }: { effect: AdminEffectAnswer; path: string }) {
  const [removing, setRemoving] = useState<number | null>(null)
  const put = useAct(async (position: number, side: Side, file: File) => {
    keep(path, await api.put<AdminEffectAnswer>(`${path}/examples/${position}/${side}`, file))
  })
  const all = effect.examples.length < EXAMPLES_MAX ? [...effect.examples, EMPTY] : effect.examples
  return (
    <Panel title={words.examples} aside={put.isRunning && <span className="quiet">{words.uploading}</span>}>
      <p className="one-effect-lead">{words.examplesText}</p>
      {put.error && (
        <div className="one-effect-lead">
          <ErrorNote error={put.error} />
        </div>
      )}
      <ol className="one-effect-examples">
        {all.map((example, place) => (
          // biome-ignore lint/suspicious/noArrayIndexKey: an example is identified by its position
          <li key={place}>
            {(["before", "after"] as const).map((side) => (
              <Print
                key={side}
                media={example[side]}
                side={words[side]}
                title={effect.title}
                label={words.put(words[side], place + 1)}
                onFile={(file) => void put.run(place, side, file)}
              />
            ))}
            {example !== EMPTY && (
              <Button
                kind="ghost"
                size="small"
                icon="trash"
                label={words.removeExample(place + 1)}
                onClick={() => setRemoving(place)}
              />
            )}
          </li>
        ))}
      </ol>
      <Confirm
        open={removing !== null}
        onClose={() => setRemoving(null)}
        title={words.askRemove}
        act={words.actRemove}
        onConfirm={async () => {
          keep(path, await api.delete<AdminEffectAnswer>(`${path}/examples/${removing}`))
        }}
      >
        {words.askRemoveText}
      </Confirm>
    </Panel>
  )
}

function keep(path: string, answer: AdminEffectAnswer): void {
  cache.set<AdminEffectAnswer>(path, () => answer)
  cache.invalidate("/api/admin/effects?")
}

interface PrintProps {
  media: ExampleMedia | null
  side: string
  title: string
  label: string
  onFile: (file: File) => void
}

function Print({ media, side, title, label, onFile }: PrintProps) {
  return (
    <figure
      onDragOver={(event) => event.preventDefault()}
      onDrop={(event) => {
        event.preventDefault()
        const file = event.dataTransfer.files[0]
        if (file) onFile(file)
      }}
    >
      <div className={media ? "print one-effect-print" : "print one-effect-print is-empty"}>
        {media?.content_type.startsWith("image/") && <img src={media.url} alt={words.shows(title, side)} />}
        {media?.content_type.startsWith("video/") && (
          <video src={media.url} muted loop autoPlay playsInline aria-label={words.shows(title, side)} />
        )}
      </div>
      <figcaption>
        <span>{side}</span>
        <PickButton accept="image/*,video/*" label={label} size="small" kind="ghost" onFile={onFile}>
          {media ? words.replace : words.add}
          <span className="unseen"> {label}</span>
        </PickButton>
      </figcaption>
    </figure>
  )
}
