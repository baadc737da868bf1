/** The browser's dialog: focus is kept inside, Escape is the safe answer, the page behind is inert. */

import { type ReactNode, useEffect, useId, useRef } from "react"
import { useAct } from "@/api"
import { words } from "@/words/en/common"
import { Button, type ButtonKind } from "./Button"
import { ErrorNote } from "./ErrorNote"

interface DialogProps {
  open: boolean
  onClose: () => void
  title: ReactNode
  children?: ReactNode
  /** Buttons, the main one last. */
  actions?: ReactNode
  wide?: boolean
  /** What is done in it takes a while: "back" closes it, and the page stays. */
  backCloses?: boolean
}

let leaves: ReturnType<typeof setTimeout> | undefined

/** An entry of its own in the history, for as long as it is on. */
function useBack(isOn: boolean, onBack: () => void): void {
  const latest = useRef(onBack)
  latest.current = onBack
  useEffect(() => {
    if (!isOn) return undefined
    if (leaves === undefined) window.history.pushState({ isDialog: true }, "")
    clearTimeout(leaves)
    leaves = undefined
    const close = () => latest.current()
    window.addEventListener("popstate", close)
    return () => {
      window.removeEventListener("popstate", close)
      if (!window.history.state?.isDialog) return
      leaves = setTimeout(() => {
        leaves = undefined
        window.history.back()
      })
    }
  }, [isOn])
}

export function Dialog({ open, onClose, title, children, actions, wide, backCloses = false }: DialogProps) {
  const box = useRef<HTMLDialogElement>(null)
  useBack(open && backCloses, onClose)
  const titleId = useId()
  useEffect(() => {
    const dialog = box.current
    if (!dialog) return
    if (open && !dialog.open) dialog.showModal()
    if (!open && dialog.open) dialog.close()
  }, [open])
  return (
    // biome-ignore lint/a11y/useKeyWithClickEvents: Escape does the same, by the browser itself
    <dialog
      ref={box}
      className={wide ? "dialog dialog-wide" : "dialog"}
      aria-labelledby={titleId}
      onCancel={(event) => {
        event.preventDefault()
        onClose()
      }}
      onClick={(event) => {
        if (event.target === box.current) onClose()
      }}
    >
      {open && (
        <div className="dialog-body">
          <h2 id={titleId}>{title}</h2>
          {children}
          {actions && <div className="dialog-actions">{actions}</div>}
        </div>
      )}
    </dialog>
  )
}

interface ConfirmProps {
  open: boolean
  onClose: () => void
  /** A question. */
  title: ReactNode
  children?: ReactNode
  /** Names the act, as "Revoke this key". */
  act: string
  kind?: ButtonKind
  /** The dialog stays open with the error where this fails. */
  onConfirm: () => Promise<unknown> | undefined
}

export function Confirm({ open, onClose, title, children, act, kind = "stop", onConfirm }: ConfirmProps) {
  const confirm = useAct(async () => {
    await onConfirm()
    onClose()
  })
  const close = () => {
    confirm.forget()
    onClose()
  }
  return (
    <Dialog
      open={open}
      onClose={close}
      title={title}
      actions={
        <>
          <Button onClick={close}>{words.keepIt}</Button>
          <Button kind={kind} busy={confirm.isRunning} onClick={() => void confirm.run()}>
            {act}
          </Button>
        </>
      }
    >
      {children && <div className="dialog-text">{children}</div>}
      {confirm.error && <ErrorNote error={confirm.error} />}
    </Dialog>
  )
}
