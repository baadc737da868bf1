import { type FormEvent, useState } from "react"
import { useLocation, useSearch } from "wouter"
import { type Session, signIn, signInHere, useAct, useSession } from "@/api"
import { Brand } from "@/app/Brand"
import { Button, ErrorNote, Field, LinkButton, Pencil, useTitle } from "@/ui"
import { words } from "@/words/en/signIn"
import { pageAfterSignIn } from "./next"
import { forgetSecret, secretInAddress } from "./secret"
import "./sign-in.css"

export default function SignIn() {
  useTitle(words.title)
  const session = useSession()
  const [key, setKey] = useState("")
  const [isEmpty, setEmpty] = useState(false)
  const params = new URLSearchParams(useSearch())
  const next = params.get("next")
  const problem = params.get("problem")
  const [, go] = useLocation()
  const enter = (signedIn: Session) => go(pageAfterSignIn(next, signedIn.kinds))
  const byKey = useAct(async () => enter(await signIn(key.trim())))
  const [secret] = useState(secretInAddress)
  const byClick = useAct(async () => {
    const signedIn = await signInHere(secret)
    forgetSecret()
    enter(signedIn)
  })
  const ways = session.data?.ways
  const canClick = ways?.one_click && secret !== ""
  const submit = (event: FormEvent) => {
    event.preventDefault()
    setEmpty(!key.trim())
    if (key.trim()) void byKey.run()
  }
  const isWrong = byKey.error?.isSignedOut
  const error = byKey.error && !isWrong ? byKey.error : byClick.error
  return (
    <div className="sign-in">
      <div className="sign-in-side">
        <Brand href="/" />
        <form className="sign-in-form" onSubmit={submit} noValidate>
          <h1>{words.title}</h1>
          {problem !== null && (
            <p className="note note-bad" role="alert">
              {words.oidcProblem(problem)}
            </p>
          )}
          {canClick && (
            <>
              <p className="quiet">{words.hereText}</p>
              <Button kind="go" size="large" busy={byClick.isRunning} onClick={() => void byClick.run()}>
                {words.here}
              </Button>
              <OrDivider />
            </>
          )}
          {ways?.one_click && !canClick && <p className="quiet">{words.noSecret}</p>}
          <Field
            className="input-large mono"
            label={words.key}
            aside={<Where />}
            type="password"
            name="key"
            autoComplete="current-password"
            autoCapitalize="off"
            spellCheck={false}
            value={key}
            error={isEmpty ? words.empty : isWrong ? words.wrong : undefined}
            onChange={(event) => setKey(event.target.value)}
          />
          <Button kind={canClick ? "plain" : "go"} size="large" type="submit" busy={byKey.isRunning}>
            {words.act}
          </Button>
          {ways?.oidc && (
            <>
              <OrDivider />
              <LinkButton
                size="large"
                outside
                href={`/auth/oidc/start?next=${encodeURIComponent(pageAfterSignIn(next, []))}`}
              >
                {words.oidc(ways.oidc_name ?? words.oidcUnnamed)}
              </LinkButton>
            </>
          )}
          {error && <ErrorNote error={error} />}
          <p className="faint sign-in-small">{words.cookie}</p>
        </form>
        <p className="mono faint sign-in-foot">
          <a href="/readyz">{words.status}</a>
          <a href="/docs">{words.api}</a>
        </p>
      </div>
      <div className="sign-in-sheet" aria-hidden="true">
        {Array.from({ length: 24 }, (_, index) => (
          // biome-ignore lint/suspicious/noArrayIndexKey: the frames of the contact sheet never change
          <i key={index}>{index === 9 && <Pencil />}</i>
        ))}
      </div>
    </div>
  )
}

function OrDivider() {
  return <p className="sign-in-or faint">{words.or}</p>
}

function Where() {
  return (
    <details className="sign-in-where">
      <summary>{words.where}</summary>
      <p>{words.whereText}</p>
    </details>
  )
}
