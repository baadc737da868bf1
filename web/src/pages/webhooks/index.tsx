import { useState } from "react"
import { api, cache, useAct, useQuery } from "@/api"
import type { MadeWebhook, WebhookAnswer, Webhooks, WebhookTest } from "@/api/schema"
import {
  Badge,
  Button,
  Confirm,
  Dialog,
  Empty,
  ErrorNote,
  Loaded,
  Page,
  Skeleton,
  Status,
  Time,
  toast,
} from "@/ui"
import { Secret } from "@/ui/ShownOnce"
import { words } from "@/words/en/webhooks"
import { DeliveryLog } from "./DeliveryLog"
import { NewWebhook } from "./NewWebhook"
import "./webhooks.css"

export default function WebhooksPage() {
  const webhooks = useQuery<Webhooks>("/api/webhooks")
  const [isNew, setNew] = useState(false)
  const [newWebhook, setNewWebhook] = useState<MadeWebhook | null>(null)
  const makeOne = (
    <Button kind="ink" icon="plus" onClick={() => setNew(true)}>
      {words.make}
    </Button>
  )
  return (
    <Page title={words.title} className="webhooks" actions={makeOne}>
      <p className="quiet webhooks-lead">{words.lead}</p>
      <Loaded query={webhooks} skeleton={<Skeleton height="220px" />}>
        {(answer) =>
          answer.webhooks.length === 0 ? (
            <Empty
              title={words.none}
              act={
                <Button kind="go" onClick={() => setNew(true)}>
                  {words.make}
                </Button>
              }
            >
              {words.noneText}
            </Empty>
          ) : (
            <div className="stack">
              {answer.webhooks.map((webhook) => (
                <OneWebhook key={webhook.id} webhook={webhook} onSecret={setNewWebhook} />
              ))}
            </div>
          )
        }
      </Loaded>
      {isNew && (
        <NewWebhook
          onClose={() => setNew(false)}
          onMade={(webhook) => {
            setNew(false)
            setNewWebhook(webhook)
          }}
        />
      )}
      {newWebhook && <SecretDialog webhook={newWebhook} onClose={() => setNewWebhook(null)} />}
    </Page>
  )
}

function SecretDialog({ webhook, onClose }: { webhook: MadeWebhook; onClose: () => void }) {
  return (
    <Dialog
      open
      onClose={onClose}
      title={words.once.title}
      actions={<Button onClick={onClose}>{words.once.done}</Button>}
    >
      <p className="dialog-text">{words.once.text}</p>
      <Secret label={words.once.label} secret={webhook.secret} />
    </Dialog>
  )
}

interface OneWebhookProps {
  webhook: WebhookAnswer
  onSecret: (webhook: MadeWebhook) => void
}

function OneWebhook({ webhook, onSecret }: OneWebhookProps) {
  const path = `/api/webhooks/${webhook.id}`
  const [isDialogOpen, setDialogOpen] = useState(false)
  const secret = useAct(async () => onSecret(await api.post<MadeWebhook>(`${path}/secret`)))
  const activate = useAct(async () => {
    await api.post(`${path}/activate`)
    cache.invalidate("/api/webhooks")
  })
  const test = useAct(async () => {
    const answer = await api.post<WebhookTest>(`${path}/test`)
    toast({
      title: answer.is_delivered ? words.tested : words.notTested,
      text: answer.error ?? words.testAnswer(answer.status ?? 0),
    })
  })
  const error = secret.error ?? activate.error ?? test.error
  return (
    <section className="panel" aria-label={webhook.url}>
      <header className="webhooks-head">
        <h2 className="mono">{webhook.url}</h2>
        <Status status={webhook.is_active ? "online" : "failed"}>
          {webhook.is_active ? words.on : words.off}
        </Status>
        <span className="row row-wrap row-end">
          {!webhook.is_active && (
            <Button kind="go" size="small" busy={activate.isRunning} onClick={() => void activate.run()}>
              {words.switchOn}
            </Button>
          )}
          <Button kind="ghost" size="small" busy={test.isRunning} onClick={() => void test.run()}>
            {words.test}
          </Button>
          <Button kind="ghost" size="small" busy={secret.isRunning} onClick={() => void secret.run()}>
            {words.secret}
          </Button>
          <Button kind="ghost" size="small" className="is-danger" onClick={() => setDialogOpen(true)}>
            {words.remove}
          </Button>
        </span>
      </header>
      <div className="webhooks-body">
        {!webhook.is_active && <p className="quiet">{words.offText}</p>}
        {error && <ErrorNote error={error} />}
        <p className="webhooks-events">
          {webhook.events.map((event) => (
            <Badge key={event}>{event}</Badge>
          ))}
          <span className="faint">
            <Time at={webhook.created_at} />
          </span>
        </p>
        <DeliveryLog webhook={webhook} />
      </div>
      <Confirm
        open={isDialogOpen}
        onClose={() => setDialogOpen(false)}
        title={words.removeTitle}
        act={words.removeAct}
        onConfirm={async () => {
          await api.delete(path)
          toast({ title: words.removed })
          // The webhook's deliveries were deleted with it, so they must not be read again.
          cache.set<Webhooks>("/api/webhooks", (before) => before && without(before, webhook.id))
        }}
      >
        <p className="mono webhooks-url">{webhook.url}</p>
        <p>{words.removeText}</p>
      </Confirm>
    </section>
  )
}

function without(list: Webhooks, id: string): Webhooks {
  return { ...list, webhooks: list.webhooks.filter((webhook) => webhook.id !== id) }
}
