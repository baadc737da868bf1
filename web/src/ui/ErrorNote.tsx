/** Shows an API error: its message, and what the user can do about it. */

import type { ReactNode } from "react"
import { Link, useLocation } from "wouter"
import { type ApiError, useOnline } from "@/api"
import { words } from "@/words/en/common"
import { Button } from "./Button"
import { StateIcon } from "./Status"

interface ErrorNoteProps {
  error: ApiError
  /** Replaces the message. */
  title?: ReactNode
  onRetry?: () => void
  /** Another way to continue: a button or a link. */
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

/** Returns the message as a sentence. If the user's own network is down, the message says so
 * instead of blaming the service. */
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
