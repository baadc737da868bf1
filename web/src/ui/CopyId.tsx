/** Shows ids and other long values in short form, and copies them in full. */

import { useEffect, useState } from "react"
import { words } from "@/words/en/common"
import { Button, type ButtonKind, type ButtonSize } from "./Button"
import { Icon } from "./Icon"

export async function copyText(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text)
    return true
  } catch {
    return copyBySelection(text)
  }
}

/** Copies without the clipboard API, which browsers disable on pages that aren't loaded over
 * HTTPS. */
function copyBySelection(text: string): boolean {
  const box = document.createElement("textarea")
  box.value = text
  box.className = "unseen"
  document.body.append(box)
  box.select()
  const copied = document.execCommand("copy")
  box.remove()
  return copied
}

/** How long "Copied" is shown, in milliseconds. */
const COPIED_MS = 2_000

function useCopied(): [boolean, (text: string) => void] {
  const [at, setAt] = useState(0)
  useEffect(() => {
    if (!at) return undefined
    const timer = setTimeout(() => setAt(0), COPIED_MS)
    return () => clearTimeout(timer)
  }, [at])
  return [at > 0, (text) => void copyText(text).then((copied) => copied && setAt(Date.now()))]
}

export function shortId(id: string): string {
  return /^[0-9a-f]{8}-[0-9a-f-]{27}$/.test(id) ? id.slice(0, 8) : id.length > 20 ? `${id.slice(0, 18)}…` : id
}

export function CopyId({ id, whole = false }: { id: string; whole?: boolean }) {
  const [isCopied, copy] = useCopied()
  return (
    <button
      type="button"
      className="copy-id"
      title={id}
      onClick={(event) => {
        event.stopPropagation()
        copy(id)
      }}
    >
      <span className="unseen">{words.copy} </span>
      <span>{whole ? id : shortId(id)}</span>
      <Icon name={isCopied ? "tick" : "copy"} size={12} />
      <span className="unseen" role="status">
        {isCopied && words.copied}
      </span>
    </button>
  )
}

export function CopyButton({
  text,
  label,
  kind,
  size,
}: {
  text: string
  label?: string
  kind?: ButtonKind
  size?: ButtonSize
}) {
  const [isCopied, copy] = useCopied()
  return (
    <Button kind={kind} size={size} icon={isCopied ? "tick" : "copy"} onClick={() => copy(text)}>
      <span aria-live="polite">{isCopied ? words.copied : (label ?? words.copy)}</span>
    </Button>
  )
}

/** A command or code snippet with a copy button. */
export function Code({ text, label }: { text: string; label: string }) {
  return (
    <div className="code">
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: keyboard users must be able to scroll long lines */}
      <pre tabIndex={0} aria-label={label}>
        <code>{text}</code>
      </pre>
      <CopyButton text={text} size="small" kind="ghost" />
    </div>
  )
}
