/** Shows a key or a secret that is displayed only once. The dialog closes when the user confirms
 * that it is stored. */

import { type ReactNode, useState } from "react"
import { useAct } from "@/api"
import { words } from "@/words/en/common"
import { Button } from "./Button"
import { CopyButton } from "./CopyId"
import { Dialog } from "./Dialog"
import { ErrorNote } from "./ErrorNote"
import { Check } from "./Field"

interface SecretProps {
  /** Names the value for screen readers. */
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
  /** Describes what was created, and for whom. */
  children?: ReactNode
  /** The text of the final button. */
  act?: string
  /** If this fails, the dialog stays open and shows the error. */
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
