/** The page of a tenant's user: keys, wallet, credit, and disabling and enabling the user. */

import { type FormEvent, useState } from "react"
import { Link } from "wouter"
import { api, cache, useAct, usePages, useQuery, useRoleReason } from "@/api"
import type {
  AdminKeyAnswer,
  AdminKeys,
  AdminMadeKey,
  AdminTransactionAnswer,
  AdminTransactions,
  AdminWalletAnswer,
  Balance,
  UserAnswer,
} from "@/api/schema"
import { isOver, KeyTable } from "@/pages/keys/KeyTable"
import { KeyShownOnce, NewKey, SCOPES } from "@/pages/keys/NewKey"
import { nameOfUser } from "@/pages/tenants/tenants"
import {
  Button,
  Confirm,
  Dialog,
  Empty,
  ErrorNote,
  Field,
  Loaded,
  Skeleton,
  shortId,
  Tabs,
  Time,
  Tokens,
  toast,
  tokens,
} from "@/ui"
import { type ListColumn, ListTable } from "@/ui/ListTable"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/tenant"

interface OfUser {
  user: UserAnswer
  /** The tenant's path in the API. */
  path: string
  isGone: boolean
}

const PARTS = (["keys", "wallet"] as const).map((key) => ({ key, title: words.user[key] }))

export function OneUser({ user, path, isGone }: OfUser) {
  const [part, setPart] = useState<"keys" | "wallet">("keys")
  const wallet = useQuery<AdminWalletAnswer>(`${path}/wallets/${user.id}`)
  return (
    <section className="panel" aria-label={nameOfUser(user)}>
      <header className="tenant-head">
        <h2>{nameOfUser(user)}</h2>
        {wallet.data && <Tokens value={wallet.data.balance} icon />}
        <span className="row row-wrap row-end">
          <OnOff user={user} path={path} isGone={isGone} />
          <Credit user={user} path={path} isGone={isGone} />
          <MakeKey user={user} path={path} isGone={isGone} />
        </span>
      </header>
      <div className="tenant-body">
        <Tabs label={words.user.parts} tabs={PARTS} value={part} onChange={setPart}>
          {part === "keys" ? <Keys user={user} path={path} /> : <Wallet user={user} path={path} />}
        </Tabs>
      </div>
    </section>
  )
}

function useOffReason({ user, isGone }: Pick<OfUser, "user" | "isGone">, role: "operator" | "owner") {
  const reason = useRoleReason(role)
  if (reason) return reason
  if (isGone) return words.user.isGone
  return user.is_active ? null : words.user.isOff
}

function MakeKey(of: OfUser) {
  const path = `${of.path}/users/${of.user.id}/keys`
  const [isNew, setNew] = useState(false)
  const [newKey, setNewKey] = useState<AdminMadeKey | null>(null)
  return (
    <>
      <Button size="small" icon="key" offReason={useOffReason(of, "operator")} onClick={() => setNew(true)}>
        {words.user.newKey}
      </Button>
      {isNew && (
        <NewKey<AdminMadeKey>
          path={path}
          mine={SCOPES}
          onClose={() => setNew(false)}
          onMade={(key) => {
            setNew(false)
            setNewKey(key)
          }}
        />
      )}
      {newKey && <KeyShownOnce newKey={newKey} onDone={() => setNewKey(null)} />}
    </>
  )
}

function Keys({ user, path }: Omit<OfUser, "isGone">) {
  const base = `${path}/users/${user.id}/keys`
  const keys = useQuery<AdminKeys>(base)
  const offReason = useRoleReason("operator")
  const [revoking, setRevoking] = useState<AdminKeyAnswer | null>(null)
  return (
    <>
      <Loaded query={keys} skeleton={<Skeleton height="96px" />}>
        {(answer) => (
          <>
            {answer.keys.every(isOver) && <Empty title={words.user.noKey}>{words.user.noKeyText}</Empty>}
            <KeyTable keys={answer.keys} onRevoke={setRevoking} offReason={offReason} />
          </>
        )}
      </Loaded>
      <Confirm
        open={revoking !== null}
        onClose={() => setRevoking(null)}
        title={words.user.revokeTitle(revoking?.name ?? "")}
        act={words.user.revokeAct}
        onConfirm={async () => {
          if (!revoking) return
          await api.post(`${base}/${revoking.id}/revoke`)
          toast({ title: words.user.revoked(revoking.name) })
          cache.invalidate(base)
        }}
      >
        {words.user.revokeText}
      </Confirm>
    </>
  )
}

function Wallet({ user, path }: Omit<OfUser, "isGone">) {
  const pages = usePages<AdminTransactionAnswer, AdminTransactions>(
    `${path}/wallets/${user.id}/transactions`,
    { limit: 50 },
    (answer) => answer.transactions,
  )
  return (
    <>
      <Loaded query={pages.first} skeleton={<Skeleton height="96px" />}>
        {() =>
          pages.rows && pages.rows.length > 0 ? (
            <div className="panel">
              <ListTable
                label={words.user.wallet}
                columns={LINES}
                rows={pages.rows}
                rowKey={(transaction) => transaction.id}
              />
            </div>
          ) : (
            <Empty title={words.wallet.none}>{words.wallet.noneText}</Empty>
          )
        }
      </Loaded>
      {pages.more.error && <ErrorNote error={pages.more.error} />}
      {pages.hasMore && (
        <Button size="small" busy={pages.more.isRunning} onClick={() => void pages.more.run()}>
          {words.wallet.more}
        </Button>
      )}
    </>
  )
}

const { columns } = words.wallet
const LINES: ListColumn<AdminTransactionAnswer>[] = [
  {
    key: "what",
    title: columns.what,
    head: true,
    cell: (transaction) => words.wallet.types[transaction.type] ?? transaction.type,
  },
  {
    key: "of",
    title: columns.of,
    mono: true,
    cell: (transaction) =>
      transaction.job_id ? (
        <Link href={`/console/jobs/${transaction.job_id}`}>{shortId(transaction.job_id)}</Link>
      ) : (
        transaction.provider_transaction_id
      ),
  },
  {
    key: "time",
    title: columns.time,
    right: true,
    cell: (transaction) => <Time at={transaction.created_at} />,
  },
  {
    key: "tokens",
    title: columns.tokens,
    right: true,
    cell: (transaction) => <Tokens value={transaction.amount} sign={transaction.amount !== 0} />,
  },
]

function Credit(of: OfUser) {
  const [isOpen, setOpen] = useState(false)
  return (
    <>
      <Button size="small" icon="plus" offReason={useOffReason(of, "owner")} onClick={() => setOpen(true)}>
        {words.user.credit}
      </Button>
      {isOpen && <CreditForm {...of} onClose={() => setOpen(false)} />}
    </>
  )
}

function CreditForm({ user, path, onClose }: OfUser & { onClose: () => void }) {
  const form = words.credit
  const [amount, setAmount] = useState("")
  const [reason, setReason] = useState("")
  const [payment, setPayment] = useState("")
  const [isChecked, setChecked] = useState(false)
  // Each attempt of this dialog uses the same id, so that a retry after a lost response credits the
  // tokens only once.
  const [own] = useState(() => `console-${crypto.randomUUID()}`)
  const isAmount = /^[1-9]\d{0,8}$/.test(amount.trim())
  const credit = useAct(async () => {
    const body = {
      amount: Number(amount),
      reason: reason.trim(),
      provider_transaction_id: payment.trim() || own,
    }
    const { balance } = await api.post<Balance>(`${path}/wallets/${user.id}/credits`, body)
    cache.invalidate(`${path}/wallets`)
    toast({ title: form.done(tokens(balance)) })
    onClose()
  })
  const submit = (event: FormEvent) => {
    event.preventDefault()
    setChecked(true)
    if (isAmount && reason.trim()) void credit.run()
  }
  return (
    <Dialog
      open
      onClose={onClose}
      title={form.title(nameOfUser(user))}
      actions={
        <>
          <Button onClick={onClose}>{common.cancel}</Button>
          <Button kind="go" type="submit" form="credit" busy={credit.isRunning}>
            {form.act}
          </Button>
        </>
      }
    >
      <form id="credit" className="stack" noValidate onSubmit={submit}>
        <Field
          label={form.amount}
          inputMode="numeric"
          error={isChecked && !isAmount && form.amountWrong}
          value={amount}
          autoComplete="off"
          autoFocus
          onChange={(event) => setAmount(event.target.value)}
        />
        <Field
          label={form.reason}
          hint={form.reasonHint}
          placeholder={form.reasonPlaceholder}
          error={isChecked && !reason.trim() && form.reasonMissing}
          value={reason}
          maxLength={500}
          autoComplete="off"
          onChange={(event) => setReason(event.target.value)}
        />
        <Field
          label={form.payment}
          hint={form.paymentHint}
          value={payment}
          maxLength={200}
          autoComplete="off"
          onChange={(event) => setPayment(event.target.value)}
        />
        {credit.error && <ErrorNote error={credit.error} />}
      </form>
    </Dialog>
  )
}

function OnOff({ user, path, isGone }: OfUser) {
  const base = `${path}/users`
  const [isDialogOpen, setDialogOpen] = useState(false)
  const reason = useRoleReason("operator") ?? (isGone ? words.user.isGone : null)
  const set = async (act: "activate" | "deactivate") => {
    await api.post(`${base}/${user.id}/${act}`)
    toast({
      title: act === "activate" ? words.user.onDone(nameOfUser(user)) : words.user.offDone(nameOfUser(user)),
    })
    cache.invalidate(base)
  }
  const activate = useAct(() => set("activate"))
  return (
    <>
      {user.is_active ? (
        <Button
          kind="ghost"
          size="small"
          className="is-danger"
          offReason={reason}
          onClick={() => setDialogOpen(true)}
        >
          {words.user.off}
        </Button>
      ) : (
        <Button size="small" offReason={reason} busy={activate.isRunning} onClick={() => void activate.run()}>
          {words.user.on}
        </Button>
      )}
      {activate.error && <ErrorNote error={activate.error} />}
      <Confirm
        open={isDialogOpen}
        onClose={() => setDialogOpen(false)}
        title={words.user.offTitle(nameOfUser(user))}
        act={words.user.off}
        onConfirm={() => set("deactivate")}
      >
        {words.user.offText}
      </Confirm>
    </>
  )
}
