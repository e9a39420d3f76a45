# bash completion of g4ir @version@; `source <(g4ir completion bash)` loads it
_g4ir_rows=(@rows@)
_g4ir() {
    local row word key found="" command="" words="" paths="" tab=$'\t'
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}
    if [[ $cur == "=" ]]; then cur=""  # --option=VALUE is three words
    elif [[ $prev == "=" ]]; then prev=${COMP_WORDS[COMP_CWORD-2]}; fi
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        key=${command:+$command }$word
        for row in "${_g4ir_rows[@]}"; do
            [[ $row == "$key$tab"* ]] && command=$key && break
        done
    done
    for key in "$command$tab$prev$tab" "$command$tab$tab"; do
        for row in "${_g4ir_rows[@]}"; do
            [[ $row == "$key"* ]] || continue
            word=${row#"$key"} word=${word%%"$tab"*} found=1
            case $word in
                "<file>") paths=file ;;
                "<folder>") paths=directory ;;
                -*) [[ $cur == -* ]] && words+=" $word" ;;
                *) words+=" $word" ;;
            esac
        done
        [[ $found ]] && break
    done
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$cur"
        [[ $words && $paths ]] && compgen -A "$paths" -- "$cur")
    case $paths in
        file) compopt -o filenames -o default ;;
        directory) compopt -o filenames -o dirnames ;;
    esac
}
complete -F _g4ir g4ir
