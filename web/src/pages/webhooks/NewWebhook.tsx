import { useState } from "react"
import { api, cache, useAct } from "@/api"
import type { MadeWebhook, WebhookEvent } from "@/api/schema"
import { Button, Check, Dialog, ErrorNote, Field } from "@/ui"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/webhooks"

const EVENTS = Object.keys(words.events) as WebhookEvent[]

export function isAddress(text: string): boolean {
  return /^https?:\/\/[^\s/]+/i.test(text.trim())
}

interface NewWebhookProps {
  onClose: () => void
  onMade: (webhook: MadeWebhook) => void
}

export function NewWebhook({ onClose, onMade }: NewWebhookProps) {
  const [url, setUrl] = useState("")
  const [events, setEvents] = useState<ReadonlySet<WebhookEvent>>(() => new Set(EVENTS))
  const [isChecked, setChecked] = useState(false)
  const make = useAct(async () => {
    const webhook = await api.post<MadeWebhook>("/api/webhooks", { url: url.trim(), events: [...events] })
    cache.invalidate("/api/webhooks")
    onMade(webhook)
  })
  const toggle = (event: WebhookEvent) => {
    const next = new Set(events)
    if (!next.delete(event)) next.add(event)
    setEvents(next)
  }
  return (
    <Dialog
      open
      onClose={onClose}
      title={words.form.title}
      actions={
        <>
          <Button onClick={onClose}>{common.cancel}</Button>
          <Button kind="go" type="submit" form="new-webhook" busy={make.isRunning}>
            {words.form.act}
          </Button>
        </>
      }
    >
      <form
        id="new-webhook"
        className="stack"
        noValidate
        onSubmit={(event) => {
          event.preventDefault()
          setChecked(true)
          if (isAddress(url) && events.size > 0) void make.run()
        }}
      >
        <Field
          type="url"
          label={words.form.url}
          hint={words.form.urlHint}
          placeholder={words.form.urlPlaceholder}
          error={isChecked && !isAddress(url) && words.form.urlMissing}
          value={url}
          autoComplete="off"
          autoFocus
          onChange={(event) => setUrl(event.target.value)}
        />
        <fieldset className="webhooks-choose">
          <legend>{words.form.events}</legend>
          {EVENTS.map((event) => (
            <Check
              key={event}
              label={words.events[event]}
              checked={events.has(event)}
              onChange={() => toggle(event)}
            />
          ))}
          {isChecked && events.size === 0 && <p className="field-error">{words.form.eventMissing}</p>}
        </fieldset>
        {make.error && <ErrorNote error={make.error} />}
      </form>
    </Dialog>
  )
}
