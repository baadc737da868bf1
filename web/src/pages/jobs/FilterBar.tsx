/** The filter field. Typed words become chips, and suggestions appear below the field. */

import { type KeyboardEvent, type Ref, useId, useState } from "react"
import { useLocation } from "wouter"
import { Icon } from "@/ui"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/jobs"
import { type Chip, isJobId, parseTyped, withChips } from "./filter"
import { type FilterValues, suggest } from "./suggest"

interface FilterBarProps {
  chips: readonly Chip[]
  onChange: (chips: Chip[]) => void
  known: FilterValues
  ref?: Ref<HTMLInputElement>
  /** Called when the user leaves the field and the focus should return to the rows. */
  onLeave: () => void
}

export function FilterBar({ chips, onChange, known, ref, onLeave }: FilterBarProps) {
  const [text, setText] = useState("")
  const [at, setAt] = useState(-1)
  const [isOpen, setOpen] = useState(false)
  const [isWrong, setWrong] = useState("")
  const [, go] = useLocation()
  const id = useId()
  const suggestions = isOpen ? suggest(text, known) : []
  const type = (value: string) => {
    setText(value)
    setAt(-1)
    setWrong("")
    setOpen(true)
  }
  const take = (typed: string) => {
    if (typed.endsWith(":")) return type(typed)
    if (isJobId(typed)) return go(`/console/jobs/${typed.trim()}`)
    const { chips: added, rest } = parseTyped(typed, known.tenantIds)
    if (added.length > 0) onChange(withChips(chips, added))
    setText(rest)
    setWrong(rest)
    setAt(-1)
    setOpen(false)
  }
  const handleKey = (event: KeyboardEvent) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key]
    if (step && suggestions.length > 0) {
      event.preventDefault()
      setAt((at + step + suggestions.length) % suggestions.length)
    } else if (event.key === "Enter" && (text.trim() || at >= 0)) {
      event.preventDefault()
      take(suggestions[at]?.text ?? text)
    } else if (event.key === "Backspace" && text === "" && chips.length > 0) {
      onChange(chips.slice(0, -1))
    } else if (event.key === "Escape") {
      if (isOpen && suggestions.length > 0) setOpen(false)
      else onLeave()
    }
  }
  return (
    <div className="jobs-filter">
      <div className="input jobs-field">
        <Icon name="search" />
        <ul className="jobs-chips">
          {chips.map((chip) => (
            <li key={`${chip.key}:${chip.value}`} className="chip jobs-chip">
              <span>{words.chips[chip.key]}</span> <b>{shown(chip, known)}</b>
              <button
                type="button"
                aria-label={words.removeChip(`${words.chips[chip.key]} ${shown(chip, known)}`)}
                onClick={() => onChange(chips.filter((other) => other !== chip))}
              >
                <Icon name="cross" size={12} />
              </button>
            </li>
          ))}
        </ul>
        <input
          ref={ref}
          role="combobox"
          aria-label={words.filter}
          aria-expanded={suggestions.length > 0}
          aria-controls={`${id}-list`}
          aria-autocomplete="list"
          aria-activedescendant={at >= 0 ? `${id}-${at}` : undefined}
          aria-describedby={isWrong ? `${id}-wrong` : undefined}
          aria-invalid={isWrong ? true : undefined}
          autoComplete="off"
          spellCheck={false}
          value={text}
          placeholder={chips.length > 0 ? "" : words.placeholder}
          onChange={(event) => type(event.target.value)}
          onKeyDown={handleKey}
          onFocus={() => setOpen(true)}
          onBlur={() => setOpen(false)}
        />
        <kbd className="wide-only">/</kbd>
      </div>
      <div
        id={`${id}-list`}
        role="listbox"
        aria-label={words.filter}
        className="menu-list jobs-found"
        hidden={suggestions.length === 0}
      >
        {suggestions.map((suggestion, index) => (
          // biome-ignore lint/a11y/useKeyWithClickEvents: the text field handles the keys
          <div
            key={suggestion.text}
            id={`${id}-${index}`}
            role="option"
            tabIndex={-1}
            aria-selected={index === at}
            className="menu-item"
            onMouseDown={(event) => event.preventDefault()}
            onClick={() => take(suggestion.text)}
          >
            <span className="mono">{suggestion.label}</span>
          </div>
        ))}
      </div>
      {isWrong && (
        <p className="field-error" id={`${id}-wrong`} role="alert">
          {words.notUnderstood(isWrong)}
        </p>
      )}
    </div>
  )
}

function shown({ key, value }: Chip, known: FilterValues): string {
  if (key === "status") return known.statusWord(value)
  if (key === "tenant") return known.tenantNames.get(value) ?? value.slice(0, 8)
  if (key === "since" || key === "until") return words.spans[value] ?? new Date(value).toLocaleString()
  return value || common.loading
}
