def report_html(data, report):
    return "x"
