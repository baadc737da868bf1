/** Shows a run's outputs: a strip while it runs, and a gallery. */

import type { GraphRunAnswer } from "@/api/schema"
import { Dialog, Empty, LinkButton } from "@/ui"
import { JsonTree } from "@/ui/JsonTree"
import { words } from "@/words/en/canvas"
import { filesIn, filesOf, type MadeFile } from "./follow"

const STRIP_MAX = 5

/** Returns the nodes' latest results. */
export function latestFiles(run: GraphRunAnswer): MadeFile[] {
  const all = run.executions.filter((execution) => execution.job_id).flatMap(filesOf)
  return [...new Map(all.map((file) => [file.file_id, file])).values()]
}

interface StripProps {
  files: readonly MadeFile[]
  /** True if the run has ended. While it runs, space is reserved for more outputs. */
  isOver: boolean
  urlOf: (file: MadeFile) => string
  onOpen: () => void
}

export function Strip({ files, isOver, urlOf, onOpen }: StripProps) {
  const shown = files.filter((file) => file.mime_type.startsWith("image/")).slice(-STRIP_MAX)
  return (
    <button type="button" className="canvas-strip" onClick={onOpen}>
      <span className="mono">{isOver ? words.made : words.madeSoFar}</span>
      {Array.from({ length: isOver ? shown.length : STRIP_MAX }, (_, at) => {
        const file = shown[at]
        return (
          // biome-ignore lint/suspicious/noArrayIndexKey: an output is identified by its position in the strip
          <i key={at}>{file && <img src={urlOf(file)} alt={file.filename} decoding="async" />}</i>
        )
      })}
      <span className="badge">{files.length}</span>
    </button>
  )
}

interface GalleryProps {
  open: boolean
  onClose: () => void
  run: GraphRunAnswer
  urlOf: (file: MadeFile) => string
}

export function Gallery({ open, onClose, run, urlOf }: GalleryProps) {
  const entries = Object.entries(run.outputs ?? {})
  const named = entries.length > 0 ? entries : [["", latestFiles(run)] as const]
  const isEmpty = filesIn(named.map(([, value]) => value)).length === 0 && entries.length === 0
  return (
    <Dialog open={open} onClose={onClose} title={words.outputsTitle} wide>
      {isEmpty && <Empty title={words.outputsNone} />}
      {named.map(([name, value]) => (
        <section key={name} className="canvas-gallery">
          {name && <h3>{name}</h3>}
          <ul>
            {filesIn(value).map((file) => (
              <li key={file.file_id}>
                <Shown file={file} url={urlOf(file)} />
                <div className="row">
                  <span className="cut-text faint">{file.filename}</span>
                  <LinkButton
                    size="small"
                    kind="ghost"
                    icon="download"
                    href={file.url}
                    download={file.filename}
                    label={words.download(file.filename)}
                    className="row-end"
                  />
                </div>
              </li>
            ))}
          </ul>
          {filesIn(value).length === 0 && <JsonTree value={value} />}
        </section>
      ))}
    </Dialog>
  )
}

function Shown({ file, url }: { file: MadeFile; url: string }) {
  if (file.mime_type.startsWith("image/"))
    return (
      <a href={file.url} className="canvas-result" target="_blank" rel="noreferrer">
        <img src={url} alt={file.filename} loading="lazy" decoding="async" />
      </a>
    )
  if (file.mime_type.startsWith("video/"))
    // biome-ignore lint/a11y/useMediaCaption: outputs have no captions
    return <video src={url} controls preload="metadata" />
  // biome-ignore lint/a11y/useMediaCaption: outputs have no captions
  if (file.mime_type.startsWith("audio/")) return <audio src={url} controls preload="none" />
  return <a href={file.url}>{file.filename}</a>
}
