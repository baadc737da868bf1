import { Link } from "wouter"
import { cache, signOut, useAccountEvents, useAct, useQuery, useSession } from "@/api"
import type { AccountAnswer } from "@/api/schema"
import { OWN_PLACES } from "@/app/CustomerShell"
import { chooseTheme, useTheme } from "@/app/theme"
import {
  Button,
  bytes,
  Choices,
  CopyId,
  count,
  ErrorNote,
  Icon,
  Loaded,
  Page,
  Panel,
  Progress,
  Skeleton,
  Time,
  Tokens,
} from "@/ui"
import { words } from "@/words/en/account"
import { words as common } from "@/words/en/common"
import "./account.css"

const THEMES = (["system", "dark", "light"] as const).map((value) => ({ value, label: common.theme[value] }))

export default function Account() {
  const account = useQuery<AccountAnswer>("/api/account")
  const readAgain = () => cache.invalidate("/api/account")
  useAccountEvents((job) => job.completed_at && readAgain(), readAgain)
  const theme = useTheme()
  return (
    <Page title={words.title} className="account">
      <Loaded query={account} skeleton={<Skeleton height="280px" />}>
        {(account) => <Facts account={account} />}
      </Loaded>
      <Panel title={words.look}>
        <div className="account-body">
          <Choices
            label={common.theme.label}
            hideLabel
            options={THEMES}
            value={theme.choice}
            onChange={chooseTheme}
          />
        </div>
      </Panel>
      <nav className="panel account-links" aria-label={words.links}>
        {OWN_PLACES.map(({ key, href, icon }) => (
          <Link key={key} href={href}>
            <Icon name={icon} />
            <span>
              <b>{common.nav[key]}</b>
              <span className="faint">{words[key]}</span>
            </span>
            <Icon name="right" />
          </Link>
        ))}
      </nav>
      <SignOut />
    </Page>
  )
}

function Facts({ account }: { account: AccountAnswer }) {
  const { user, tenant, key, limits } = account
  const session = useSession().data
  return (
    <>
      <Panel title={words.who} aside={<Tokens value={account.balance} icon />}>
        <dl className="account-body account-facts">
          <dt>{words.name}</dt>
          <dd>{user.name ?? <span className="faint">{words.none}</span>}</dd>
          <dt>{words.email}</dt>
          <dd>{user.email ?? <span className="faint">{words.none}</span>}</dd>
          <dt>{words.tenant}</dt>
          <dd>{tenant.name}</dd>
          <dt>{words.user}</dt>
          <dd>
            <CopyId id={user.id} />
          </dd>
        </dl>
      </Panel>
      <Panel title={words.limits}>
        <div className="account-body stack">
          <Room
            label={words.jobs}
            part={limits.active_jobs / limits.max_active_jobs}
            text={words.jobsText(count(limits.active_jobs), count(limits.max_active_jobs))}
          />
          <Room
            label={words.storage}
            part={limits.used_storage_bytes / limits.max_storage_bytes}
            text={words.storageText(bytes(limits.used_storage_bytes), bytes(limits.max_storage_bytes))}
          />
          <p className="account-line">
            <span>{words.upload}</span> <span className="quiet">{bytes(limits.max_upload_bytes)}</span>
          </p>
        </div>
      </Panel>
      <Panel title={words.browser}>
        <dl className="account-body account-facts">
          <dt>{words.signedInWith}</dt>
          <dd>
            {key.name} <span className="mono faint">{key.prefix}…</span>
          </dd>
          <dt>{words.may}</dt>
          <dd>{key.scopes.map((scope) => words.scopes[scope]).join(", ")}</dd>
          {session?.expires_at && (
            <>
              <dt>{words.until}</dt>
              <dd>
                <Time at={session.expires_at} />
              </dd>
            </>
          )}
        </dl>
      </Panel>
    </>
  )
}

function Room({ label, part, text }: { label: string; part: number; text: string }) {
  return (
    <div>
      <p className="account-line">
        <span>{label}</span> <span className="quiet">{text}</span>
      </p>
      <Progress label={label} value={part} state="ink" />
    </div>
  )
}

function SignOut() {
  const out = useAct(signOut)
  return (
    <p className="account-out">
      <Button icon="out" busy={out.isRunning} onClick={() => void out.run()}>
        {common.signOut}
      </Button>
      <span className="faint">{words.signOutText}</span>
      {out.error && <ErrorNote error={out.error} />}
    </p>
  )
}
