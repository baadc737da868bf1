/** Picks the file for an effect: dropped, pasted, selected or taken from the user's media. The
 * upload starts immediately. */

import { type ReactNode, useCallback, useEffect, useId, useRef, useState, useSyncExternalStore } from "react"
import { ApiError, useQuery } from "@/api"
import type { Video, Videos } from "@/api/schema"
import { Button, bytes, Dialog, Empty, ErrorNote, Icon, Loaded, Progress, Skeleton, StateIcon } from "@/ui"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/effect"
import { acceptOf, fileMistake, refusalOf, type Takes, typeNames } from "./form"
import { FileUpload } from "./upload"

/** The chosen file. `upload` is null for a file from the user's media. */
export interface Chosen {
  name: string
  size: number | null
  url: string | null
  mediaId: string | null
  upload: FileUpload | null
}

interface MediaInputProps {
  label: string
  takes: Takes
  effectId: string
  chosen: Chosen | null
  onChange: (chosen: Chosen | null) => void
  /** True if the field accepts files that are pasted or dropped anywhere on the page. */
  isMain?: boolean
  error?: string | null
  isOptional?: boolean
}

export function chosenFile(file: File, effectId: string | null): Chosen {
  return {
    name: file.name || "file",
    size: file.size,
    url: URL.createObjectURL(file),
    mediaId: null,
    upload: new FileUpload(file, effectId),
  }
}

export function forget(chosen: Chosen | null): void {
  chosen?.upload?.stop()
  if (chosen?.upload && chosen.url) URL.revokeObjectURL(chosen.url)
}

export function MediaInput(props: MediaInputProps) {
  const { label, takes, effectId, chosen, onChange, isMain = false, error, isOptional } = props
  const [mistake, setMistake] = useState<string | null>(null)
  const [isPicking, setPicking] = useState(false)
  const picker = useRef<HTMLInputElement>(null)
  const id = useId()
  const noun = words.noun[takes.kind] ?? "file"
  const give = useCallback(
    (file: File) => {
      const wrong = fileMistake(file, takes)
      setMistake(wrong)
      if (!wrong) onChange(chosenFile(file, isMain ? effectId : null))
    },
    [takes, effectId, isMain, onChange],
  )
  const isOver = usePageFiles(isMain, give)
  const wrong = mistake ?? error
  return (
    <section className="field effect-media" aria-labelledby={`${id}-label`}>
      <div className="field-label">
        <span id={`${id}-label`}>{label}</span>
        <span className="row">
          {isOptional && <span className="field-hint">{words.optional}</span>}
          <button type="button" className="link effect-hint" onClick={() => setPicking(true)}>
            {words.fromMedia}
          </button>
        </span>
      </div>
      {chosen ? (
        <ChosenRow
          chosen={chosen}
          kind={takes.kind}
          onRemove={() => onChange(null)}
          onPick={() => picker.current?.click()}
        />
      ) : (
        <button
          type="button"
          className={`effect-drop${wrong ? " is-wrong" : ""}${isOver ? " is-over" : ""}`}
          aria-describedby={wrong ? `${id}-error` : undefined}
          onClick={() => picker.current?.click()}
          onDragOver={(event) => event.preventDefault()}
          onDrop={(event) => {
            event.preventDefault()
            event.stopPropagation()
            const file = event.dataTransfer.files[0]
            if (file) give(file)
          }}
        >
          <Icon name="upload" size={20} />
          <span>{isOver ? words.dropNow : words.drop(noun)}</span>
          <span className="effect-pick">{wrong ? words.pickAnother : words.pick}</span>
          <span className="field-hint">
            {typeNames(takes)}, {words.upTo(bytes(takes.max_bytes))}
          </span>
        </button>
      )}
      {wrong && (
        <p className="field-error" id={`${id}-error`} role="alert">
          {wrong}
        </p>
      )}
      <input
        ref={picker}
        type="file"
        className="unseen"
        tabIndex={-1}
        aria-label={label}
        accept={acceptOf(takes)}
        onChange={(event) => {
          const file = event.target.files?.[0]
          event.target.value = ""
          if (file) give(file)
        }}
      />
      <FromMedia
        open={isPicking}
        kind={takes.kind}
        onClose={() => setPicking(false)}
        onTake={(picked) => {
          setMistake(null)
          onChange(picked)
        }}
      />
    </section>
  )
}

/** Passes on files that are pasted, or dropped anywhere on the page. */
function usePageFiles(isMain: boolean, give: (file: File) => void): boolean {
  const [isOver, setOver] = useState(false)
  useEffect(() => {
    if (!isMain) return undefined
    const paste = (event: ClipboardEvent) => {
      const file = event.clipboardData?.files[0]
      if (!file) return
      event.preventDefault()
      give(file)
    }
    const over = (event: DragEvent) => {
      if (!event.dataTransfer?.types.includes("Files")) return
      event.preventDefault()
      setOver(true)
    }
    const leave = (event: DragEvent) => {
      if (!event.relatedTarget) setOver(false)
    }
    const drop = (event: DragEvent) => {
      setOver(false)
      const file = event.dataTransfer?.files[0]
      if (!file) return
      event.preventDefault()
      give(file)
    }
    document.addEventListener("paste", paste)
    document.addEventListener("dragover", over)
    document.addEventListener("dragleave", leave)
    document.addEventListener("drop", drop)
    return () => {
      document.removeEventListener("paste", paste)
      document.removeEventListener("dragover", over)
      document.removeEventListener("dragleave", leave)
      document.removeEventListener("drop", drop)
    }
  }, [isMain, give])
  return isOver
}

interface ChosenRowProps {
  chosen: Chosen
  kind: string
  onRemove: () => void
  onPick: () => void
}

function ChosenRow({ chosen, kind, onRemove, onPick }: ChosenRowProps) {
  const [size, setSize] = useState<string | null>(null)
  const [unseen, setUnseen] = useState<string | null>(null)
  const facts = [size, chosen.size === null ? null : bytes(chosen.size)].filter(Boolean).join(" · ")
  return (
    <div className="effect-chosen">
      <div className="print effect-thumb">
        {kind === "image" && (!chosen.url || chosen.url === unseen) && <Icon name="picture" />}
        {kind === "image" && chosen.url && chosen.url !== unseen && (
          <img
            src={chosen.url}
            alt=""
            onLoad={({ currentTarget: { naturalWidth, naturalHeight } }) =>
              setSize(`${naturalWidth}×${naturalHeight}`)
            }
            onError={() => setUnseen(chosen.url)}
          />
        )}
        {chosen.url && kind === "video" && <video src={chosen.url} muted preload="metadata" />}
        {kind === "audio" && <Icon name="sound" />}
      </div>
      <div className="effect-chosen-text">
        <div className="row">
          <strong className="cut-text">{chosen.name}</strong>
          <Button
            kind="ghost"
            size="small"
            icon="cross"
            label={words.remove(chosen.name)}
            className="row-end"
            onClick={onRemove}
          />
        </div>
        <span className="mono faint effect-size">{facts || " "}</span>
        {chosen.upload ? (
          <SentBar upload={chosen.upload} kind={kind} size={chosen.size ?? 0} onPick={onPick} />
        ) : (
          <UploadState state="succeeded">{words.ofMedia}</UploadState>
        )}
      </div>
    </div>
  )
}

function UploadState({ state, children }: { state: "succeeded" | "failed" | "queued"; children: ReactNode }) {
  return (
    <span className="effect-told">
      <StateIcon state={state} size={12} />
      {children}
    </span>
  )
}

interface SentBarProps {
  upload: FileUpload
  kind: string
  size: number
  onPick: () => void
}

/** Shows the upload's progress. It describes the file in plain words, because users don't know
 * media types. */
function SentBar({ upload, kind, size, onPick }: SentBarProps) {
  const { phase, sentBytes, error } = useSyncExternalStore(upload.subscribe, upload.state)
  if (phase === "failed" && error) {
    const refusal = refusalOf(error, kind)
    return (
      <ErrorNote
        error={refusal ? new ApiError(error.code, refusal, error.status) : error}
        title={words.notTaken}
      >
        <Button size="small" onClick={onPick}>
          {words.pickAnother}
        </Button>
      </ErrorNote>
    )
  }
  const text = {
    sending: words.uploading(bytes(sentBytes), bytes(size)),
    paused: words.paused,
    linking: words.checking,
    done: words.there,
    failed: words.uploadFailed,
  }[phase]
  return (
    <>
      <Progress
        label={words.upload}
        value={size ? sentBytes / size : 0}
        state={phase === "done" ? "succeeded" : "ink"}
      />
      <span className="effect-told" role="status">
        {phase === "paused" && <Icon name="offline" size={12} />}
        {phase === "done" && <StateIcon state="succeeded" size={12} />}
        <span>{text}</span>
        {phase === "sending" && (
          <span className="mono row-end">{size ? Math.floor((100 * sentBytes) / size) : 0}%</span>
        )}
      </span>
    </>
  )
}

/** Returns the phase of the chosen file's upload, or null if no upload is in progress. */
export function usePhase(chosen: Chosen | null) {
  const upload = chosen?.upload
  return useSyncExternalStore(
    useCallback((listener) => upload?.subscribe(listener) ?? (() => undefined), [upload]),
    () => upload?.state().phase ?? null,
  )
}

export function chosenMedia(media: Pick<Video, "id" | "filename" | "original_file_url">): Chosen {
  return {
    name: media.filename ?? words.unnamed,
    size: null,
    url: media.original_file_url,
    mediaId: media.id,
    upload: null,
  }
}

interface FromMediaProps {
  open: boolean
  kind: string
  onClose: () => void
  onTake: (picked: Chosen) => void
}

function FromMedia({ open, kind, onClose, onTake }: FromMediaProps) {
  const noun = words.noun[kind] ?? "file"
  return (
    <Dialog
      open={open}
      onClose={onClose}
      title={words.mediaTitle(noun)}
      actions={<Button onClick={onClose}>{common.cancel}</Button>}
      wide
      backCloses
    >
      <MediaPage
        kind={kind}
        before={null}
        onTake={(picked) => {
          onTake(picked)
          onClose()
        }}
      />
    </Dialog>
  )
}

interface MediaPageProps {
  kind: string
  before: string | null
  onTake: (picked: Chosen) => void
}

/** Shows one page of the user's media, followed by the next page on request. */
function MediaPage({ kind, before, onTake }: MediaPageProps) {
  const [isMore, setMore] = useState(false)
  const page = useQuery<Videos>("/api/videos", { query: { kind, urls: true, limit: 24, before } })
  return (
    <Loaded query={page} skeleton={<Skeleton height="160px" />}>
      {({ videos, next }) => {
        const available = videos.filter((item) => item.original_file_url)
        return (
          <>
            {available.length === 0 && before === null && <Empty title={words.mediaNone} />}
            <ul className="effect-sheet">
              {available.map((item) => (
                <li key={item.id}>
                  <button
                    type="button"
                    className="print"
                    aria-label={words.take(item.filename ?? words.unnamed)}
                    onClick={() => onTake(chosenMedia(item))}
                  >
                    {kind === "image" && (
                      <img
                        src={item.original_small_url ?? item.original_file_url ?? ""}
                        alt=""
                        loading="lazy"
                      />
                    )}
                    {kind === "video" && (
                      <video src={item.original_file_url ?? ""} muted preload="metadata" />
                    )}
                    {kind === "audio" && <Icon name="sound" />}
                  </button>
                  <span className="cut-text faint">{item.filename ?? words.unnamed}</span>
                </li>
              ))}
            </ul>
            {next && !isMore && <Button onClick={() => setMore(true)}>{words.mediaMore}</Button>}
            {next && isMore && <MediaPage kind={kind} before={next} onTake={onTake} />}
          </>
        )
      }}
    </Loaded>
  )
}
