/** Lists one webhook's deliveries, with the number of attempts and the responses. */

import { useEffect, useState } from "react"
import { Link } from "wouter"
import { api, cache, useAct, usePages } from "@/api"
import type { Deliveries, DeliveryAnswer, WebhookAnswer } from "@/api/schema"
import { Button, Dialog, Empty, ErrorNote, Loaded, Skeleton, Status, shortId, Time, toast } from "@/ui"
import { JsonTree } from "@/ui/JsonTree"
import { type ListColumn, ListTable } from "@/ui/ListTable"
import { words } from "@/words/en/webhooks"

const PAGE = 20
/** The interval between reads. Deliveries have no event stream. */
const LOOK_AGAIN_MS = 5_000

export function DeliveryLog({ webhook }: { webhook: WebhookAnswer }) {
  const path = `/api/webhooks/${webhook.id}/deliveries`
  const pages = usePages<DeliveryAnswer, Deliveries>(path, { limit: PAGE }, (answer) => answer.deliveries)
  const [seen, setSeen] = useState<DeliveryAnswer | null>(null)
  useEffect(() => {
    const timer = setInterval(() => document.hidden || cache.invalidate(path), LOOK_AGAIN_MS)
    return () => clearInterval(timer)
  }, [path])
  return (
    <>
      <h3>{words.log}</h3>
      <Loaded query={pages.first} skeleton={<Skeleton height="80px" />}>
        {() =>
          pages.rows && pages.rows.length > 0 ? (
            <ListTable
              label={words.log}
              columns={columnsOf(path, setSeen)}
              rows={pages.rows}
              rowKey={(delivery) => delivery.id}
            />
          ) : (
            <Empty title={words.noDelivery}>{words.noDeliveryText}</Empty>
          )
        }
      </Loaded>
      {pages.more.error && <ErrorNote error={pages.more.error} />}
      {pages.hasMore && (
        <Button size="small" busy={pages.more.isRunning} onClick={() => void pages.more.run()}>
          {words.older}
        </Button>
      )}
      <Dialog open={seen !== null} onClose={() => setSeen(null)} title={words.showPayload} wide>
        <JsonTree value={seen?.payload ?? null} />
      </Dialog>
    </>
  )
}

interface OfDelivery {
  path: string
  delivery: DeliveryAnswer
}

function columnsOf(path: string, onSee: (delivery: DeliveryAnswer) => void): ListColumn<DeliveryAnswer>[] {
  const { columns } = words
  return [
    {
      key: "state",
      title: columns.state,
      cell: (delivery) => <Status status={delivery.status}>{words.states[delivery.status]}</Status>,
    },
    { key: "event", title: columns.event, mono: true, cell: (delivery) => delivery.event },
    {
      key: "job",
      title: columns.job,
      mono: true,
      cell: (delivery) => <Link href={`/results/${delivery.job_id}`}>{shortId(delivery.job_id)}</Link>,
    },
    {
      key: "answer",
      title: columns.answer,
      cell: (delivery) => delivery.last_error ?? delivery.last_status ?? words.noAnswer,
    },
    { key: "tries", title: columns.tries, cell: (delivery) => delivery.tries },
    { key: "time", title: columns.time, cell: (delivery) => <Times delivery={delivery} /> },
    {
      key: "acts",
      title: columns.acts,
      acts: true,
      cell: (delivery) => (
        <>
          <Button kind="ghost" size="small" onClick={() => onSee(delivery)}>
            {words.showPayload}
          </Button>
          <Again path={path} delivery={delivery} />
        </>
      ),
    },
  ]
}

function Times({ delivery }: { delivery: DeliveryAnswer }) {
  return (
    <>
      <Time at={delivery.created_at} />
      {delivery.next_try_at && (
        <span className="faint">
          , {words.nextTry} <Time at={delivery.next_try_at} />
        </span>
      )}
    </>
  )
}

function Again({ path, delivery }: OfDelivery) {
  const again = useAct(async () => {
    await api.post(`${path}/${delivery.id}/redeliver`)
    toast({ title: words.sent, state: "queued" })
    cache.invalidate(path)
  })
  return (
    <>
      <Button size="small" icon="again" busy={again.isRunning} onClick={() => void again.run()}>
        {words.again}
      </Button>
      {again.error && <ErrorNote error={again.error} />}
    </>
  )
}
