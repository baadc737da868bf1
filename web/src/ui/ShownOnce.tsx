/** A key or a secret that is shown only now: the dialog closes when the reader says that it is stored. */

import { type ReactNode, useState } from "react"
import { useAct } from "@/api"
import { words } from "@/words/en/common"
import { Button } from "./Button"
import { CopyButton } from "./CopyId"
import { Dialog } from "./Dialog"
import { ErrorNote } from "./ErrorNote"
import { Check } from "./Field"

interface SecretProps {
  /** For screen readers: what it is. */
  label: string
  secret: string
}

export function Secret({ label, secret }: SecretProps) {
  return (
    <div className="secret">
      <output className="mono" aria-label={label}>
        {secret}
      </output>
      <CopyButton text={secret} kind="go" size="small" />
    </div>
  )
}

interface ShownOnceProps extends SecretProps {
  title?: string
  text?: string
  /** What was made, and for whom. */
  children?: ReactNode
  /** Names what is done at the end. */
  act?: string
  /** The dialog stays open with the error where this fails. */
  onDone: () => unknown
}

export function ShownOnce({ label, secret, title, text, children, act, onDone }: ShownOnceProps) {
  const [isStored, setStored] = useState(false)
  const done = useAct(async () => onDone())
  return (
    <Dialog
      open
      onClose={() => isStored && void done.run()}
      title={title ?? words.once.title}
      actions={
        <Button
          offReason={!isStored && words.once.first}
          busy={done.isRunning}
          onClick={() => void done.run()}
        >
          {act ?? words.once.done}
        </Button>
      }
    >
      <p className="dialog-text">{text ?? words.once.text}</p>
      <Secret label={label} secret={secret} />
      {children}
      <Check
        label={words.once.stored}
        checked={isStored}
        onChange={(event) => setStored(event.target.checked)}
      />
      {done.error && <ErrorNote error={done.error} />}
    </Dialog>
  )
}
