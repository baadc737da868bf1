/** The browser's native dialog: it traps focus, Escape cancels, and the page behind it is inert. */

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
  /** The buttons, with the main one last. */
  actions?: ReactNode
  wide?: boolean
  /** True if the browser's Back button closes the dialog instead of leaving the page. Meant for
   * dialogs that stay open for long. */
  backCloses?: boolean
}

let leaves: ReturnType<typeof setTimeout> | undefined

/** Adds a history entry while `isOn` is true, and calls `onBack` when the user goes back. */
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
    // biome-ignore lint/a11y/useKeyWithClickEvents: the browser itself does the same on Escape
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
  /** The question to confirm. */
  title: ReactNode
  children?: ReactNode
  /** Names the action, such as "Revoke this key". */
  act: string
  kind?: ButtonKind
  /** If this fails, the dialog stays open and shows the error. */
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
