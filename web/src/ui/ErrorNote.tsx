/** An error of the API: its message, and a way on. */

import type { ReactNode } from "react"
import { Link, useLocation } from "wouter"
import { type ApiError, useOnline } from "@/api"
import { words } from "@/words/en/common"
import { Button } from "./Button"
import { StateIcon } from "./Status"

interface ErrorNoteProps {
  error: ApiError
  /** Instead of the message. */
  title?: ReactNode
  onRetry?: () => void
  /** Another way on: a button or a link. */
  children?: ReactNode
}

export function ErrorNote({ error, title, onRetry, children }: ErrorNoteProps) {
  const [here] = useLocation()
  const message = messageOf(error, useOnline())
  return (
    <div className="note note-bad" role="alert">
      <StateIcon state="failed" />
      <div className="note-text">
        <strong>{title ?? message}</strong>
        {title && <span>{message}</span>}
        {error.retryAfterSeconds !== null && <span>{words.retryIn(error.retryAfterSeconds)}</span>}
      </div>
      <div className="note-acts">
        {children}
        {error.isSignedOut && (
          <Link
            className="button button-plain button-small"
            href={`/sign-in?next=${encodeURIComponent(here)}`}
          >
            {words.signIn}
          </Link>
        )}
        {onRetry && !error.isSignedOut && (
          <Button size="small" icon="again" onClick={onRetry}>
            {words.tryAgain}
          </Button>
        )}
      </div>
    </div>
  )
}

/** As a sentence. Nobody looks for the fault of the service while the own network is gone. */
export function messageOf(error: ApiError, isOnline: boolean): string {
  if (error.isOffline && !isOnline) return words.youAreOffline
  if (error.isOwnNetwork) return words.youWereOffline
  if (error.isOffline) return words.offline
  return sentence(error.message)
}

function sentence(text: string): string {
  const trimmed = text.trim()
  const ended = /[.!?…]$/.test(trimmed) ? trimmed : `${trimmed}.`
  return ended.charAt(0).toUpperCase() + ended.slice(1)
}
