/** Fields for expressions and templates. An error is marked at its character, and names can be
 * inserted by click or keyboard. */

import { type ReactNode, useRef, useState } from "react"
import { Select, TextArea } from "@/ui"
import { words } from "@/words/en/canvas"

/** Converts the typed text to the expected type. */
export function typedValue(text: string, type: string): unknown {
  if (text === "") return undefined
  if (type === "text" || type === "choice") return text
  try {
    return JSON.parse(text) as unknown
  } catch {
    return text
  }
}

/** Formats a value as the user would type it. */
export function textOf(value: unknown): string {
  if (value === undefined || value === null) return ""
  return typeof value === "string" ? value : JSON.stringify(value)
}

interface MarkedProps {
  label: ReactNode
  hint?: ReactNode
  aside?: ReactNode
  placeholder?: string
  text: string
  wrong: string | undefined
  onChange: (text: string) => void
  children?: ReactNode
}

/** A text area that marks the character of an error in a copy of the text below it. */
function MarkedArea({ text, wrong, children, onChange, ...rest }: MarkedProps) {
  const at = Number(/\(character (\d+)\)/.exec(wrong ?? "")?.[1])
  return (
    <div className="canvas-expression">
      <TextArea
        {...rest}
        rows={1}
        error={wrong}
        value={text}
        spellCheck={false}
        onChange={(event) => onChange(event.target.value)}
      />
      {at ? (
        <pre className="canvas-mistake" aria-hidden="true">
          {text.slice(0, at - 1)}
          <mark>{text.slice(at - 1, at) || " "}</mark>
          {text.slice(at)}
        </pre>
      ) : null}
      {children}
    </div>
  )
}

interface ExpressionFieldProps {
  label: string
  hint?: string
  placeholder?: string
  text: string
  wrong: string | undefined
  /** The names that the expression can use, such as output.width. */
  names: readonly string[]
  onChange: (text: string) => void
}

export function ExpressionField({ names, ...props }: ExpressionFieldProps) {
  const { text, onChange } = props
  return (
    <MarkedArea {...props}>
      {names.length > 0 && (
        <ul className="canvas-fields" aria-label={words.conditionFields}>
          {names.map((name) => (
            <li key={name}>
              <button
                type="button"
                className="chip mono"
                aria-label={words.insert(name)}
                onClick={() => onChange(`${text}${text && !text.endsWith(" ") ? " " : ""}${name}`)}
              >
                {name.replace(/^output\./, "")}
              </button>
            </li>
          ))}
        </ul>
      )}
    </MarkedArea>
  )
}

interface TemplateFieldProps {
  label: string
  hint?: ReactNode
  placeholder?: string
  /** The expected type. With a numeric type, a typed number becomes a number. */
  type: string
  value: unknown
  wrong: string | undefined
  names: readonly string[]
  onChange: (value: unknown) => void
}

/** Edits a value or a template that produces it, with names of other nodes in `{{ }}`. */
export function TemplateField(props: TemplateFieldProps) {
  const { label, hint, placeholder, type, value, wrong, names, onChange } = props
  const [typed, setTyped] = useState(() => textOf(value))
  const frame = useRef<HTMLDivElement>(null)
  // Keeps the text exactly as the user typed it, for example "1.0", as long as it represents the
  // same value.
  const isMine = JSON.stringify(typedValue(typed, type) ?? null) === JSON.stringify(value ?? null)
  const text = isMine ? typed : textOf(value)
  const change = (next: string) => {
    setTyped(next)
    onChange(typedValue(next, type))
  }
  const insert = (name: string) => {
    const area = frame.current?.querySelector("textarea")
    const [begin, end] = [area?.selectionStart ?? text.length, area?.selectionEnd ?? text.length]
    change(`${text.slice(0, begin)}{{ ${name} }}${text.slice(end)}`)
    area?.focus()
  }
  return (
    <div ref={frame} className="canvas-template">
      <MarkedArea {...{ label, hint, placeholder, text, wrong }} onChange={change} />
      {names.length > 0 && (
        <Select
          label={words.insertInto(label)}
          hideLabel
          options={[
            { value: "", label: words.insertValue },
            ...names.map((name) => ({ value: name, label: name })),
          ]}
          value=""
          onChange={(name) => name && insert(name)}
        />
      )}
    </div>
  )
}
