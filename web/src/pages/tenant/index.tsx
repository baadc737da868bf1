/** The tenant page, with the tenant's users, their keys and wallets, its limits, its ledger and its
 * deletion. */

import { type FormEvent, useMemo, useState } from "react"
import { useLocation, useSearch } from "wouter"
import { api, cache, useAct, useAuditNews, usePages, useQuery, useRoleReason } from "@/api"
import type { AdminWallets, TenantAnswer, UserAnswer, Users } from "@/api/schema"
import { ICONS, isEmail, nameOfUser, stateOfTenant } from "@/pages/tenants/tenants"
import {
  Button,
  CopyId,
  Crumb,
  count,
  Dialog,
  Empty,
  ErrorNote,
  Field,
  LinkButton,
  Loaded,
  Page,
  Panel,
  Skeleton,
  Status,
  Time,
  toast,
} from "@/ui"
import { type ListColumn, ListTable } from "@/ui/ListTable"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/tenant"
import { words as list } from "@/words/en/tenants"
import { Erase, Ledger, Limits, Prompts } from "./Parts"
import { OneUser } from "./User"
import "@/pages/fleets/fleets.css"
import "./tenant.css"

const WALLETS = 500

export default function TenantPage({ id }: { id: string }) {
  const path = `/api/admin/tenants/${encodeURIComponent(id)}`
  const tenant = useQuery<TenantAnswer>(path)
  useAuditNews(() => cache.invalidate(path))
  const answer = tenant.data
  const state = answer && stateOfTenant(answer)
  return (
    <Page
      className="tenant"
      title={answer?.name ?? list.title}
      aside={
        state && (
          <Status status={ICONS[state]} pill>
            {list.states[state]}
          </Status>
        )
      }
      actions={
        <>
          <LinkButton href={`/console/jobs?tenant=${id}`}>{words.jobs}</LinkButton>
          <LinkButton href={`/console/audit?tenant=${id}`}>{words.audit}</LinkButton>
        </>
      }
    >
      <Crumb href="/console/tenants" list={words.tenants}>
        <CopyId id={id} whole />
      </Crumb>
      <Loaded
        query={tenant}
        skeleton={<Skeleton height="50vh" />}
        missing={
          <Empty
            title={words.noTenant}
            act={<LinkButton href="/console/tenants">{words.allTenants}</LinkButton>}
          >
            {words.noTenantText}
          </Empty>
        }
      >
        {(details) => <Whole tenant={details} path={path} />}
      </Loaded>
    </Page>
  )
}

function Whole({ tenant, path }: { tenant: TenantAnswer; path: string }) {
  const state = stateOfTenant(tenant)
  return (
    <>
      {state !== "active" && (
        <p className="tenant-note" role="status">
          {state === "erased" ? words.erasedNote : words.erasingNote}
        </p>
      )}
      <div className="tenant-columns">
        <UserList path={path} isGone={state !== "active"} />
        <div className="tenant-side">
          <Limits tenant={tenant} path={path} isGone={state !== "active"} />
          <Prompts path={path} isGone={state !== "active"} />
          <Ledger tenantId={tenant.id} />
          {state === "active" && <Erase tenant={tenant} path={path} />}
        </div>
      </div>
    </>
  )
}

function UserList({ path, isGone }: { path: string; isGone: boolean }) {
  const pages = usePages<UserAnswer, Users>(`${path}/users`, { limit: 100 }, (page) => page.users, "after")
  const wallets = useQuery<AdminWallets>(`${path}/wallets`, { query: { limit: WALLETS } })
  const balances = useMemo(
    () => new Map(wallets.data?.wallets.map((wallet) => [wallet.user_id, wallet.balance])),
    [wallets.data],
  )
  const [isNew, setNew] = useState(false)
  const [here, go] = useLocation()
  const named = new URLSearchParams(useSearch()).get("user")
  const offReason = useRoleReason("operator") ?? (isGone ? words.user.isGone : null)
  const users = pages.rows
  const shown = users?.find((user) => user.id === named) ?? users?.[0]
  const show = (id: string) => go(`${here}?user=${id}`, { replace: true })
  return (
    <div className="stack">
      <Panel
        title={words.users.title}
        aside={
          <Button size="small" icon="plus" offReason={offReason} onClick={() => setNew(true)}>
            {words.users.add}
          </Button>
        }
      >
        <Loaded query={pages.first} skeleton={<Skeleton height="96px" />}>
          {() =>
            users && users.length > 0 ? (
              <ListTable
                label={words.users.title}
                columns={columnsOf(balances, show)}
                rows={users}
                rowKey={(user) => user.id}
                isCurrent={(user) => user.id === shown?.id}
              />
            ) : (
              <Empty title={words.users.none}>{words.users.noneText}</Empty>
            )
          }
        </Loaded>
      </Panel>
      {pages.more.error && <ErrorNote error={pages.more.error} />}
      {pages.hasMore && (
        <Button size="small" busy={pages.more.isRunning} onClick={() => void pages.more.run()}>
          {words.users.more}
        </Button>
      )}
      {shown && <OneUser key={shown.id} user={shown} path={path} isGone={isGone} />}
      {isNew && (
        <NewUser
          path={`${path}/users`}
          onClose={() => setNew(false)}
          onAdded={(user) => {
            setNew(false)
            show(user.id)
          }}
        />
      )}
    </div>
  )
}

function columnsOf(
  balances: ReadonlyMap<string, number>,
  show: (id: string) => void,
): ListColumn<UserAnswer>[] {
  const { columns, active, inactive } = words.users
  return [
    {
      key: "name",
      title: columns.name,
      head: true,
      cell: (user) => (
        <button type="button" className="tenant-user" onClick={() => show(user.id)}>
          {nameOfUser(user)}
        </button>
      ),
    },
    { key: "email", title: columns.email, cell: (user) => (user.name ? user.email : null) },
    {
      key: "state",
      title: columns.state,
      cell: (user) => (
        <Status status={user.is_active ? "online" : "cancelled"}>{user.is_active ? active : inactive}</Status>
      ),
    },
    {
      key: "balance",
      title: columns.balance,
      right: true,
      cell: (user) => count(balances.get(user.id) ?? 0),
    },
    { key: "made", title: columns.made, right: true, cell: (user) => <Time at={user.created_at} /> },
  ]
}

interface NewUserProps {
  path: string
  onClose: () => void
  onAdded: (user: UserAnswer) => void
}

function NewUser({ path, onClose, onAdded }: NewUserProps) {
  const { form } = words.users
  const [name, setName] = useState("")
  const [email, setEmail] = useState("")
  const isWrong = email.trim() !== "" && !isEmail(email)
  const [isChecked, setChecked] = useState(false)
  const add = useAct(async () => {
    const user = await api.post<UserAnswer>(path, { name: name.trim() || null, email: email.trim() || null })
    cache.invalidate(path)
    toast({ title: words.users.added })
    onAdded(user)
  })
  const submit = (event: FormEvent) => {
    event.preventDefault()
    setChecked(true)
    if (!isWrong) void add.run()
  }
  return (
    <Dialog
      open
      onClose={onClose}
      title={form.title}
      actions={
        <>
          <Button onClick={onClose}>{common.cancel}</Button>
          <Button kind="go" type="submit" form="new-user" busy={add.isRunning}>
            {form.act}
          </Button>
        </>
      }
    >
      <form id="new-user" className="stack" noValidate onSubmit={submit}>
        <Field
          label={form.name}
          hint={form.hint}
          value={name}
          maxLength={100}
          autoComplete="off"
          autoFocus
          onChange={(event) => setName(event.target.value)}
        />
        <Field
          type="email"
          label={form.email}
          hint={form.hint}
          error={isChecked && isWrong && form.emailWrong}
          value={email}
          autoComplete="off"
          onChange={(event) => setEmail(event.target.value)}
        />
        {add.error && <ErrorNote error={add.error} />}
      </form>
    </Dialog>
  )
}
